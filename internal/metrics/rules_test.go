package metrics

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/instance"
)

// rulesFile is a Prometheus rules file.
type rulesFile struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []rule `yaml:"rules"`
	} `yaml:"groups"`
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

var (
	descName   = regexp.MustCompile(`fqName: "([^"]+)"`)
	descLabels = regexp.MustCompile(`variableLabels: \{([^}]*)\}`)
	metricName = regexp.MustCompile(`\b(?:tagout_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?`)
	matcher    = regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
)

// everyMetric returns what the daemons' registries have, with the labels of each.
func everyMetric(t *testing.T) map[string][]string {
	t.Helper()
	r := NewRegistry("test", "test")
	NewSandboxd(r)
	NewProxy(r)
	NewCredd(r)
	NewDNSFilter(r)
	r.Killswitch()
	r.Drills(nil)
	r.AuditLog(nil)
	NewAuditKeep(r)
	descs := make(chan *prometheus.Desc)
	go func() { r.reg.Describe(descs); close(descs) }()
	out := map[string][]string{"up": {"job"}} // Prometheus' own
	for d := range descs {
		name, labels := descName.FindStringSubmatch(d.String()), descLabels.FindStringSubmatch(d.String())
		if name == nil || labels == nil {
			t.Fatalf("a description of another form: %s", d)
		}
		out[name[1]] = strings.Split(labels[1], ",")
	}
	if len(out) < 20 {
		t.Fatalf("only %d metrics: the test would prove nothing", len(out))
	}
	return out
}

// problems returns one line for each metric, label or daemon in expr that does not exist.
func problems(expr string, metrics map[string][]string) (out []string, named int) {
	for _, m := range metricName.FindAllStringSubmatch(expr, -1) {
		named++
		name, _, _ := strings.Cut(m[0], "{")
		labels, ok := metrics[name]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, cut := strings.CutSuffix(name, suffix); !ok && cut {
				labels, ok = metrics[base]
			}
		}
		if !ok {
			out = append(out, "there is no metric "+name)
			continue
		}
		for _, l := range matcher.FindAllStringSubmatch(m[1], -1) {
			if !slices.Contains(labels, l[1]) {
				out = append(out, fmt.Sprintf("%s has no label %s, only %v", name, l[1], labels))
			}
			if l[1] == "daemon" && !slices.Contains(instance.Daemons(), l[2]) {
				out = append(out, "there is no daemon "+l[2])
			}
		}
	}
	return out, named
}

// TestRulesNameWhatExists: a rule about a metric that nobody serves never fires, and nobody notices.
func TestRulesNameWhatExists(t *testing.T) {
	raw, err := os.ReadFile("../../deploy/alerts/tagout.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var f rulesFile
	if err := yaml.UnmarshalWithOptions(raw, &f, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	metrics := everyMetric(t)
	seen := map[string]bool{}
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || seen[r.Alert] || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("rule %+v lacks something or is there twice", r)
			}
			seen[r.Alert] = true
			wrong, named := problems(r.Expr, metrics)
			if named == 0 {
				t.Errorf("%s names no metric: %s", r.Alert, r.Expr)
			}
			for _, w := range wrong {
				t.Errorf("%s: %s", r.Alert, w)
			}
		}
	}
	for _, d := range instance.Daemons() {
		if !strings.Contains(string(raw), fmt.Sprintf("daemon=%q", d)) {
			t.Errorf("no rule notices that %s is missing", d)
		}
	}
	if len(seen) < 5 {
		t.Errorf("only %d rules", len(seen))
	}
}

func TestTheCheckSeesWrongRules(t *testing.T) {
	metrics := everyMetric(t)
	for _, expr := range []string{
		`rate(tagout_sandboxd_denial_total[5m]) > 1`, `tagout_sandboxd_denials_total{raeson="ok"} > 1`, `absent(tagout_daemon_info{daemon="prox"})`,
	} {
		if wrong, _ := problems(expr, metrics); len(wrong) == 0 {
			t.Errorf("%s passes", expr)
		}
	}
	if wrong, _ := problems(`rate(tagout_sandboxd_spawn_seconds_bucket{outcome="ok"}[5m])`, metrics); len(wrong) != 0 {
		t.Errorf("a good expression does not pass: %v", wrong)
	}
}
