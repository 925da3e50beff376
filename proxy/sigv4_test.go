package proxy

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

const accessKey = "AKIAIOSFODNN7EXAMPLE"

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	io.WriteString(h, text)
	return h.Sum(nil)
}

func sha(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// uriEncode is UriEncode() of the signature's specification.
func uriEncode(text string, slash bool) string {
	var b strings.Builder
	for i := range len(text) {
		c := text[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0 || c == '/' && !slash {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// verifyAWS says what is wrong with a request's signature, as a service would: written after the specification, without
// the library that the proxy signs with.
func verifyAWS(r *http.Request, body []byte) error {
	auth := r.Header.Get("Authorization")
	part := map[string]string{}
	rest, ok := strings.CutPrefix(auth, "AWS4-HMAC-SHA256 ")
	for f := range strings.SplitSeq(rest, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(f), "=")
		part[name] = value
	}
	scope := strings.Split(part["Credential"], "/")
	if !ok || len(scope) != 5 || scope[0] != accessKey || scope[4] != "aws4_request" {
		return fmt.Errorf("credential %q", auth)
	}
	at, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	if err != nil || time.Since(at).Abs() > time.Minute || at.Format("20060102") != scope[1] {
		return fmt.Errorf("date %q: %v", r.Header.Get("X-Amz-Date"), err)
	}
	path := uriEncode(r.URL.Path, false)
	if scope[3] != "s3" { // as it came, encoded once more
		path, _, _ = strings.Cut(r.RequestURI, "?")
		path = uriEncode(path, false)
	}
	var query []string
	for pair := range strings.SplitSeq(r.URL.RawQuery, "&") {
		if pair == "" {
			continue
		}
		name, value, _ := strings.Cut(pair, "=")
		n, err1 := url.PathUnescape(name)
		v, err2 := url.PathUnescape(value)
		if err1 != nil || err2 != nil {
			return fmt.Errorf("query %q", pair)
		}
		query = append(query, uriEncode(n, true)+"="+uriEncode(v, true))
	}
	slices.Sort(query)
	var fields string
	signed := strings.Split(part["SignedHeaders"], ";")
	if !slices.IsSorted(signed) || !slices.Contains(signed, "host") || !slices.Contains(signed, "x-amz-date") {
		return fmt.Errorf("signed headers %q", signed)
	}
	for _, name := range signed {
		value := strings.Join(r.Header.Values(name), ",")
		switch name {
		case "host":
			value = r.Host
		case "content-length":
			value = fmt.Sprint(r.ContentLength)
		}
		fields += name + ":" + strings.Join(strings.Fields(value), " ") + "\n"
	}
	hash := r.Header.Get("X-Amz-Content-Sha256")
	switch {
	case hash == "" && scope[3] == "s3":
		return fmt.Errorf("no X-Amz-Content-Sha256")
	case hash == "":
		hash = sha(string(body))
	case len(hash) == 64 && hash != sha(string(body)):
		return fmt.Errorf("another body than was signed")
	}
	canonical := strings.Join([]string{r.Method, path, strings.Join(query, "&"), fields, part["SignedHeaders"], hash}, "\n")
	toSign := strings.Join([]string{"AWS4-HMAC-SHA256", r.Header.Get("X-Amz-Date"), strings.Join(scope[1:], "/"), sha(canonical)}, "\n")
	key := mac(mac(mac(mac([]byte("AWS4"+realValue), scope[1]), scope[2]), scope[3]), scope[4])
	if want := hex.EncodeToString(mac(key, toSign)); want != part["Signature"] {
		return fmt.Errorf("signature %s, want %s for\n%s", part["Signature"], want, canonical)
	}
	return nil
}

// TestSigV4: what a kid signs with a token arrives signed with the key, for a server that computes the signature by
// itself. The control is the kid's own signature, which the same server refuses.
func TestSigV4(t *testing.T) {
	kid := aws.Credentials{AccessKeyID: token, SecretAccessKey: token, SessionToken: token}
	sign := func(service, hash string, presign bool) func(*http.Request) {
		return func(r *http.Request) {
			hash := hash
			if hash != "" {
				r.Header.Set("X-Amz-Content-Sha256", hash)
			} else {
				hash = sha("")
			}
			s := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = service == "s3" })
			if !presign {
				must(t, s.SignHTTP(t.Context(), kid, r, hash, service, "eu-west-1", time.Now()))
				return
			}
			to, _, err := s.PresignHTTP(t.Context(), kid, r, hash, service, "eu-west-1", time.Now())
			must(t, err)
			u, err := url.Parse(to)
			must(t, err)
			r.URL = u
		}
	}
	for _, tc := range []struct {
		name, method, target, body string
		sign                       func(*http.Request)
		edit                       func(*http.Request)
		want                       reason.Code
	}{
		{name: "S3, GET", method: "GET", target: "/bucket/a%20b%281%29/%C3%BC~%2B.txt?list-type=2&prefix=a%2Fb&acl&x=%20y", sign: sign("s3", sha(""), false)},
		{name: "S3, a path as browsers write it", method: "GET", target: "/bucket/a(1)+'!.txt", sign: sign("s3", sha(""), false)},
		{name: "S3, PUT", method: "PUT", target: "/bucket/key", body: "data", sign: sign("s3", sha("data"), false)},
		{name: "S3, another body than signed", method: "PUT", target: "/bucket/key", body: "data", sign: sign("s3", sha("other"), false), want: reason.TokenUnknown},
		{name: "S3, unsigned", method: "PUT", target: "/bucket/key", body: long, sign: sign("s3", "UNSIGNED-PAYLOAD", false)},
		{name: "S3, chunks without signatures", method: "PUT", target: "/bucket/key", body: "4\r\ndata\r\n0\r\n\r\n", sign: sign("s3", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", false)},
		{name: "S3, chunks with signatures", method: "PUT", target: "/bucket/key", body: "4\r\ndata\r\n0\r\n\r\n", sign: sign("s3", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", false), want: reason.TokenScope},
		{name: "S3, presigned", method: "GET", target: "/bucket/key?versionId=3&X-Amz-Expires=60", sign: sign("s3", "UNSIGNED-PAYLOAD", true)},
		{name: "S3, no hash", method: "PUT", target: "/bucket/key", body: "data", sign: sign("s3", "", false)},
		{name: "DynamoDB", method: "POST", target: "/", body: `{"TableName":"x"}`, sign: sign("dynamodb", "", false), edit: func(r *http.Request) {
			r.Header.Set("Content-Type", "application/x-amz-json-1.0")
			r.Header.Set("X-Amz-Target", "DynamoDB_20120810.GetItem")
		}},
		{name: "a path that is escaped twice", method: "GET", target: "/a%20b/c:d", sign: sign("execute-api", "", false)},
		{name: "a body of unknown length", method: "POST", target: "/", body: "x=1", sign: sign("sts", "", false), edit: func(r *http.Request) {
			r.ContentLength = -1
			r.Header.Set("Content-Type", formType)
		}},
		{name: "a body in pieces that is not read whole", method: "POST", target: "/", body: strings.Repeat("x", maxSignBody+bodyStep+1), sign: sign("lambda", "", false), want: reason.TokenScope},
		{name: "a scope of another form", method: "GET", target: "/", sign: func(r *http.Request) {
			r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+token+"/20260101/aws4_request, SignedHeaders=host, Signature=0")
		}, want: reason.TokenScope},
		{name: "a field that the client signed", method: "GET", target: "/k", sign: sign("s3", sha(""), false), edit: func(r *http.Request) {
			r.Header.Set("Range", "bytes=0-1")
			r.Header.Add("X-Amz-Meta-A", "  a   b ")
		}},
	} {
		for _, way := range ways {
			t.Run(way.name+", "+tc.name, func(t *testing.T) {
				w := newWorld(t)
				var mu sync.Mutex
				var asked []wire.ResolveRequest
				w.tokens.resolve = bound(wire.Presentation{As: wire.AsSigV4, User: accessKey}, &asked, &mu)
				c, base := way.client(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					if err := verifyAWS(r, body); err != nil {
						rw.WriteHeader(http.StatusForbidden)
						fmt.Fprint(rw, err)
					}
					if text := fmt.Sprint(r.URL, r.Header); strings.Contains(text, token) || strings.Contains(text, realValue) {
						t.Errorf("the server got %s", text)
					}
					fmt.Fprint(rw, " ", r.Header.Get("Authorization"))
				}), func(r *policy.Rule) { r.Credential = "api" })
				r := request(tc.method, base+tc.target, tc.body)
				if tc.edit != nil {
					tc.edit(r)
				}
				tc.sign(r)
				resp, err := c.Do(r)
				must(t, err)
				answer := new(strings.Builder)
				if tc.want == reason.TokenScope {
					if p := problemOf(t, resp); p.Reason != tc.want {
						t.Errorf("%s %v", resp.Status, p)
					}
					return
				}
				io.Copy(answer, resp.Body)
				if wrong := tc.want != reason.OK; (resp.StatusCode != 200) != wrong {
					t.Errorf("%s: %s", resp.Status, answer)
				}
				if _, signature, _ := strings.Cut(answer.String(), "Signature="); tc.want == reason.OK && strings.Trim(signature, "*") != "" {
					t.Errorf("the signature came back: %s", answer)
				}
			})
		}
	}
	r := request("GET", "http://"+apiHost+"/k", "")
	sign("s3", sha(""), false)(r)
	if err := verifyAWS(r, nil); err == nil {
		t.Error("the server takes a signature that was made with a token")
	}
}

// TestSigV4OfALease: temporary keys go with their session token, which is signed, and does not come back.
func TestSigV4OfALease(t *testing.T) {
	const session = "session-token-of-the-lease/+=="
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			w := newWorld(t)
			var mu sync.Mutex
			var asked []wire.ResolveRequest
			resolve := bound(wire.Presentation{As: wire.AsSigV4, User: accessKey}, &asked, &mu)
			w.tokens.resolve = func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
				reply, err := resolve(ctx, req)
				reply.SessionToken = session
				return reply, err
			}
			c, base := way.client(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if err := verifyAWS(r, body); err != nil || r.Header.Get("X-Amz-Security-Token") != session || !strings.Contains(r.Header.Get("Authorization"), "x-amz-security-token") {
					rw.WriteHeader(http.StatusForbidden)
					fmt.Fprint(rw, err)
				}
				fmt.Fprint(rw, r.Header.Get("X-Amz-Security-Token"))
			}), func(r *policy.Rule) { r.Credential = "api" })
			r := request("GET", base+"/bucket/key", "")
			r.Header.Set("X-Amz-Content-Sha256", sha(""))
			signer := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true })
			must(t, signer.SignHTTP(t.Context(), aws.Credentials{AccessKeyID: token, SecretAccessKey: token}, r, sha(""), "s3", "eu-west-1", time.Now()))
			resp, err := c.Do(r)
			must(t, err)
			answer := new(strings.Builder)
			io.Copy(answer, resp.Body)
			if resp.StatusCode != 200 || strings.Contains(answer.String(), session) {
				t.Errorf("%s: %s", resp.Status, answer)
			}
		})
	}
}
