package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestProvidersOfTheExample(t *testing.T) {
	t.Parallel()
	b, err := Load("../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Providers) != 4 {
		t.Fatalf("%d providers", len(b.Providers))
	}
	bao, aws := b.Providers[0], b.Providers[3]
	if bao.Kind != ProviderOpenBao || bao.Mount != "approle" || bao.MaxLifetime != 8*time.Hour || len(bao.Addresses) != 1 || !slices.Equal(bao.Hosts(), []string{"bao.example.com:8200"}) {
		t.Errorf("%+v", bao)
	}
	if !slices.Equal(bao.Secrets(), []string{"bao_role_id", "bao_secret_id"}) || !slices.Equal(b.Providers[1].Secrets(), []string{"id_client_secret", "ada_token"}) {
		t.Errorf("%v %v", bao.Secrets(), b.Providers[1].Secrets())
	}
	if !slices.Equal(aws.Hosts(), []string{"sts.eu-central-1.amazonaws.com:443", "iam.amazonaws.com:443"}) || aws.Timeout != DefaultProviderTimeout {
		t.Errorf("%+v", aws)
	}
	raw, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("box.yaml", raw)
	if err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	if !reflect.DeepEqual(again.Providers, b.Providers) {
		t.Errorf("written and read again: %+v", again.Providers)
	}
}

func TestProvidersThatAreRefused(t *testing.T) {
	t.Parallel()
	const good = `providers:
  - name: bao
    openbao: https://bao.example.com:8200
    roleID: bao_role
    secretID: bao_secret
    roles: [{name: r, path: database/creds/r, value: password}]
`
	if _, err := Parse("box.yaml", []byte(minimal+good)); err != nil {
		t.Fatalf("the control: %v", err)
	}
	for _, c := range []struct{ from, to, want string }{
		{"https://bao.example.com:8200", "http://bao.example.com:8200", "not an https URL"},
		{"https://bao.example.com:8200", "https://127.0.0.1:8200", "not a host name"},
		{"https://bao.example.com:8200", "https://u:p@bao.example.com", "more than a host"},
		{"https://bao.example.com:8200", "https://bao.example.com/v1", "has a path"},
		{"    roleID: bao_role\n", "", "how to log in"},
		{"roleID: bao_role", "roleID: bao_role\n    tokenFile: /run/t", "how to log in"},
		{"roleID: bao_role", "roleID: \"hvs.a b\"", "not the name of a secret"},
		{"path: database/creds/r", "path: ../sys/raw", "is not one"},
		{"path: database/creds/r", "path: sys/leases/lookup", "is not one"},
		{"value: password", "scopes: [a]", "value is missing"},
		{"    roleID", "    addresses: [169.254.169.254]\n    roleID", "never called"},
		{"    roleID", "    oauth: https://x.example.com\n    roleID", "cannot be both"},
		{"    roleID", "    timeout: 1h\n    roleID", "timeout is"},
		{"    roleID", "    region: x\n    roleID", "means nothing"},
		{"[{name: r, path: database/creds/r, value: password}]", "[]", "nothing can be leased"},
		{"name: bao", "name: Bao Bao", "cannot be a name"},
	} {
		text := strings.Replace(good, c.from, c.to, 1)
		if _, err := Parse("box.yaml", []byte(minimal+text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q for %q: %v", c.to, c.from, err)
		}
	}
	const github = "providers:\n  - {name: g, githubApp: \"https://api.github.com\", appID: \"1\", key: k, roles: [{name: r, installation: 1, repositories: [], permissions: {contents: read}}]}\n"
	if _, err := Parse("box.yaml", []byte(minimal+github)); err == nil || !strings.Contains(err.Error(), "all of the installation's") {
		t.Errorf("no repositories: %v", err)
	}
	const oauth = "providers:\n  - {name: o, oauth: \"https://id.example.com/t\", revoke: \"https://evil.example.com/r\", clientID: c, clientSecret: s, roles: [{name: r}]}\n"
	if _, err := Parse("box.yaml", []byte(minimal+oauth)); err == nil || !strings.Contains(err.Error(), "another host") {
		t.Errorf("revocation elsewhere: %v", err)
	}
}
