package providertest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// AWS is STS and IAM in one: AssumeRole with session tags, and inline policies of one role, which are evaluated as far as
// a revocation needs it. A credential is an access key id.
type AWS struct {
	base
	KeyID, Key string
	Full       bool // the role takes no more policies

	pmu      sync.Mutex
	issued   map[string]session // access key id -> session; guarded by pmu
	policies map[string]string  // name -> document; guarded by pmu
}

type session struct {
	tags map[string]string
	at   time.Time
}

// NewAWS returns an AWS with one user and the role "deploy".
func NewAWS() *AWS {
	return &AWS{KeyID: "AKIA" + strings.ToUpper(random("")[:16]), Key: random("k/"), issued: map[string]session{}, policies: map[string]string{}}
}

// Policies is how many inline policies the role has.
func (a *AWS) Policies() int {
	a.pmu.Lock()
	defer a.pmu.Unlock()
	return len(a.policies)
}

// Accepts says whether the access key id may do anything now.
func (a *AWS) Accepts(keyID string) bool {
	a.pmu.Lock()
	defer a.pmu.Unlock()
	s, ok := a.issued[keyID]
	if !ok {
		return false
	}
	for _, doc := range a.policies {
		if denies(doc, s) {
			return false
		}
	}
	return true
}

// denies evaluates a deny-everything statement whose conditions must all hold.
func denies(doc string, s session) bool {
	var p struct {
		Statement []struct {
			Effect           string
			Action, Resource []string
			Condition        map[string]map[string]string
		}
	}
	if json.Unmarshal([]byte(doc), &p) != nil {
		return false
	}
	for _, st := range p.Statement {
		hit := st.Effect == "Deny" && len(st.Action) == 1 && st.Action[0] == "*" && len(st.Resource) == 1 && st.Resource[0] == "*"
		for op, keys := range st.Condition {
			for key, want := range keys {
				hit = hit && s.meets(op, key, want)
			}
		}
		if hit {
			return true
		}
	}
	return false
}

func (s session) meets(op, key, want string) bool {
	tag, isTag := strings.CutPrefix(key, "aws:PrincipalTag/")
	switch {
	case op == "DateLessThan" && key == "aws:TokenIssueTime":
		t, err := time.Parse(time.RFC3339, want)
		return err == nil && s.at.Before(t)
	case op == "StringEquals" && isTag:
		return s.tags[tag] == want
	}
	return false
}

// ServeHTTP is the API.
func (a *AWS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.serve(w, r, http.HandlerFunc(a.query))
}

// Handler is the API without faults.
func (a *AWS) Handler() http.Handler { return http.HandlerFunc(a.query) }

func (a *AWS) query(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	if err != nil || !a.signed(r, body) {
		a.deny(w, "SignatureDoesNotMatch")
		return
	}
	if r.ParseForm() != nil {
		a.deny(w, "MalformedQueryString")
		return
	}
	switch r.PostForm.Get("Action") {
	case "AssumeRole":
		a.assume(w, r)
	case "PutRolePolicy":
		a.pmu.Lock()
		defer a.pmu.Unlock()
		if a.Full {
			a.deny(w, "LimitExceeded")
			return
		}
		a.policies[r.PostForm.Get("PolicyName")] = r.PostForm.Get("PolicyDocument")
	case "DeleteRolePolicy":
		a.pmu.Lock()
		defer a.pmu.Unlock()
		delete(a.policies, r.PostForm.Get("PolicyName"))
	default:
		a.deny(w, "InvalidAction")
	}
}

// signed signs the request again and compares.
func (a *AWS) signed(r *http.Request, body []byte) bool {
	at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	parts := strings.Split(r.Header.Get("Authorization"), "/")
	if err != nil || len(parts) < 5 || time.Since(at).Abs() > 15*time.Minute {
		return false
	}
	again, _ := http.NewRequestWithContext(context.Background(), r.Method, "https://"+r.Host+r.URL.Path, bytes.NewReader(body)) // it was a request already
	again.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	again.Header.Set("User-Agent", r.UserAgent())
	sum := sha256.Sum256(body)
	err = v4.NewSigner().SignHTTP(context.Background(), aws.Credentials{AccessKeyID: a.KeyID, SecretAccessKey: a.Key}, again, hex.EncodeToString(sum[:]), parts[3], parts[2], at)
	return err == nil && again.Header.Get("Authorization") == r.Header.Get("Authorization")
}

func (a *AWS) deny(w http.ResponseWriter, code string) {
	w.WriteHeader(http.StatusForbidden)
	io.WriteString(w, "<ErrorResponse><Error><Type>Sender</Type><Code>"+code+"</Code></Error></ErrorResponse>") // the client is gone
}

func (a *AWS) assume(w http.ResponseWriter, r *http.Request) {
	s := session{at: time.Now().UTC().Truncate(time.Second), tags: map[string]string{}}
	for _, n := range []string{"1", "2"} {
		s.tags[r.PostForm.Get("Tags.member."+n+".Key")] = r.PostForm.Get("Tags.member." + n + ".Value")
	}
	id := "ASIA" + strings.ToUpper(random("")[:16])
	a.pmu.Lock()
	a.issued[id] = s
	a.pmu.Unlock()
	d, err := time.ParseDuration(r.PostForm.Get("DurationSeconds") + "s")
	if err != nil || d < 15*time.Minute {
		a.deny(w, "ValidationError")
		return
	}
	type credentials struct {
		AccessKeyId, SecretAccessKey, SessionToken, Expiration string
	}
	xml.NewEncoder(w).Encode(struct { // the client is gone
		XMLName xml.Name    `xml:"AssumeRoleResponse"`
		C       credentials `xml:"AssumeRoleResult>Credentials"`
	}{C: credentials{id, random("sk/"), random("token//"), s.at.Add(d).Format(time.RFC3339)}})
}
