package provider

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// AWS leases temporary credentials: STS AssumeRole, with the session and the lease as session tags. AWS has no call that
// revokes them. What it has is a policy on the role that denies everything to tokens issued before now
// (AWSRevokeOlderSessions); Revoke puts such a policy on the role for the one lease, by its tag, so that the role's
// other sessions go on. It takes effect within seconds, as IAM spreads. Tidy takes it off when the lease's time is over.
//
// The role's trust policy has to allow sts:TagSession; the caller needs iam:PutRolePolicy and iam:DeleteRolePolicy on it.
type AWS struct {
	STS, IAM Endpoint
	KeyID    string // vault entries with the caller's long-lived key
	Key      string
	Secrets  Secrets
	Roles    map[string]AWSRole
	Now      func() time.Time // for signatures, which are good for minutes
}

// Endpoint is one service.
type Endpoint struct {
	Call   Call
	URL    string // "https://sts.eu-central-1.amazonaws.com"
	Region string // that signatures are for; IAM's is us-east-1
}

// AWSRole is one role that can be assumed.
type AWSRole struct {
	ARN string // "arn:aws:iam::123456789012:role/deploy"
}

// Names of the session tags, and bounds of a duration (API reference, AssumeRole).
const (
	tagSession = "TagoutSession"
	tagLease   = "TagoutLease"

	leastAWS = 15 * time.Minute
	mostAWS  = 12 * time.Hour
)

type stsAnswer struct {
	XMLName xml.Name `xml:"AssumeRoleResponse"`
	Given   struct {
		KeyID   string    `xml:"AccessKeyId"`
		Key     string    `xml:"SecretAccessKey"`
		Token   string    `xml:"SessionToken"`
		Expires time.Time `xml:"Expiration"`
	} `xml:"AssumeRoleResult>Credentials"`
}

type awsError struct {
	Code string `xml:"Error>Code"`
}

// Mint assumes the role.
func (w *AWS) Mint(ctx context.Context, r Request) (Lease, error) {
	role, ok := w.Roles[r.Role]
	if !ok {
		return Lease{}, fail(Refused, "no role is called %q", r.Role)
	}
	h := Handle{Role: r.Role, ID: r.ID}
	if err := r.Note(h); err != nil { // the tag is all that a revocation needs, whatever becomes of the answer
		return Lease{}, err
	}
	seconds := int64(min(max(r.Lifetime, leastAWS), mostAWS) / time.Second)
	form := url.Values{
		"Action": {"AssumeRole"}, "Version": {"2011-06-15"}, "RoleArn": {role.ARN},
		"RoleSessionName": {"tagout-" + r.ID}, "DurationSeconds": {strconv.FormatInt(seconds, 10)},
		"Tags.member.1.Key": {tagSession}, "Tags.member.1.Value": {r.Session},
		"Tags.member.2.Key": {tagLease}, "Tags.member.2.Value": {r.ID},
	}
	a, err := w.ask(ctx, "assuming the role", w.STS, "sts", form)
	if err != nil {
		return Lease{}, err
	}
	defer clear(a.body)
	var got stsAnswer
	if xml.Unmarshal(a.body, &got) != nil { // the decoder's words may quote a secret
		return Lease{}, fail(Malformed, "assuming the role: its answer cannot be read")
	}
	lives, err := lifetime(int64(got.Given.Expires.Sub(a.at) / time.Second))
	if err != nil {
		return Lease{}, err
	}
	l := Lease{Handle: h, Lifetime: lives, Secret: Secret{Value: got.Given.Key, User: got.Given.KeyID, Session: got.Given.Token}}
	if l.Secret.User == "" || l.Secret.Session == "" {
		return Lease{}, fail(Malformed, "assuming the role: the answer holds no whole credentials")
	}
	return l, checkSecret(l.Secret)
}

// Renew is refused: new credentials take the old ones' place.
func (w *AWS) Renew(context.Context, Handle, time.Duration) (time.Duration, error) {
	return 0, fail(Refused, "temporary credentials are not renewed")
}

// Revoke denies the lease everything.
func (w *AWS) Revoke(ctx context.Context, h Handle) error {
	role, ok := w.Roles[h.Role]
	if !ok {
		return fail(Refused, "revoking: no role is called %q any more", h.Role)
	}
	a, err := w.ask(ctx, "putting the revocation on the role", w.IAM, "iam", url.Values{
		"Action": {"PutRolePolicy"}, "Version": {"2010-05-08"}, "RoleName": {role.name()},
		"PolicyName": {policyName(h)}, "PolicyDocument": {revocation(h, w.Now())},
	})
	clear(a.body)
	return err
}

// Tidy takes the policy of a lease off again.
func (w *AWS) Tidy(ctx context.Context, h Handle) error {
	role, ok := w.Roles[h.Role]
	if !ok {
		return fail(Refused, "tidying up: no role is called %q any more", h.Role)
	}
	a, err := w.ask(ctx, "taking the revocation off the role", w.IAM, "iam", url.Values{
		"Action": {"DeleteRolePolicy"}, "Version": {"2010-05-08"}, "RoleName": {role.name()}, "PolicyName": {policyName(h)},
	})
	clear(a.body)
	return err
}

func policyName(h Handle) string { return "AWSRevokeOlderSessions-tagout-" + h.ID }

// name is the last part of the ARN: a role may have a path.
func (r AWSRole) name() string { return r.ARN[strings.LastIndexByte(r.ARN, '/')+1:] }

// revocation is the policy that IAM's "Revoke active sessions" puts on a role, for one lease alone.
func revocation(h Handle, now time.Time) string {
	doc, _ := json.Marshal(map[string]any{ // texts
		"Version": "2012-10-17",
		"Statement": []any{map[string]any{
			"Effect": "Deny", "Action": []string{"*"}, "Resource": []string{"*"},
			"Condition": map[string]any{
				"DateLessThan": map[string]string{"aws:TokenIssueTime": now.UTC().Add(time.Second).Format("2006-01-02T15:04:05Z")},
				"StringEquals": map[string]string{"aws:PrincipalTag/" + tagLease: h.ID},
			},
		}},
	})
	return string(doc)
}

// ask sends a signed form. The returned answer is a success.
func (w *AWS) ask(ctx context.Context, what string, at Endpoint, service string, form url.Values) (answer, error) {
	keyID, err := w.Secrets(w.KeyID)
	if err != nil {
		return answer{}, fail(Refused, "%s: %v", what, err)
	}
	key, err := w.Secrets(w.Key)
	if err != nil {
		return answer{}, fail(Refused, "%s: %v", what, err)
	}
	a := formAsk(what, at.URL+"/", nil, form)
	sum := sha256.Sum256(a.body)
	a.sign = func(r *http.Request) error {
		return v4.NewSigner().SignHTTP(ctx, aws.Credentials{AccessKeyID: keyID, SecretAccessKey: key}, r, hex.EncodeToString(sum[:]), service, at.Region, w.Now())
	}
	said, err := at.Call.do(ctx, a)
	if err != nil {
		return answer{}, err
	}
	if said.ok() {
		return said, nil
	}
	defer clear(said.body)
	var why awsError
	if xml.Unmarshal(said.body, &why) != nil {
		why.Code = "" // the status alone will do
	}
	if why.Code == "Throttling" || why.Code == "RequestLimitExceeded" {
		return answer{}, fail(Unreachable, "%s: it asks to be asked later (%s)", what, why.Code)
	}
	return answer{}, said.no(what, why.Code)
}
