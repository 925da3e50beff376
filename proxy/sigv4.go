package proxy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/smithy-go/encoding/httpbinding"

	"tagout/internal/reason"
	"tagout/internal/tokenshape"
	"tagout/internal/wire"
)

// Words of AWS Signature Version 4.
const (
	awsAlgorithm  = "AWS4-HMAC-SHA256"
	awsFamily     = "AWS4-" // of all its algorithms
	awsHash       = "X-Amz-Content-Sha256"
	awsUnsigned   = "UNSIGNED-PAYLOAD"
	awsUnsignedIn = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
	awsChunkwise  = "STREAMING-"
)

// awsScope is what a request is to be signed for.
type awsScope struct {
	reply           wire.ResolveReply
	region, service string
	signed          []string // names of the fields that the kid signed, in lower case
	presigned       bool     // its signature stood in the query
}

// findAWS takes the kid's signature off a request that is signed with a token, wherever it stands: nothing of it is
// worth anything. The request is signed anew once everything else about it is settled.
func (s *swap) findAWS() *refusal {
	if auth := s.r.Header.Get("Authorization"); strings.HasPrefix(auth, awsFamily) {
		algorithm, rest, _ := strings.Cut(auth, " ")
		part := map[string]string{}
		for field := range strings.SplitSeq(rest, ",") {
			name, value, _ := strings.Cut(strings.TrimSpace(field), "=")
			part[name] = value
		}
		return s.claimAWS(algorithm, part["Credential"], part["SignedHeaders"], false)
	}
	if !strings.Contains(s.r.URL.RawQuery, awsFamily) {
		return nil
	}
	q, err := url.ParseQuery(s.r.URL.RawQuery)
	if err != nil || !strings.HasPrefix(q.Get("X-Amz-Algorithm"), awsFamily) {
		return nil // no signature: tokens in it are found as in any query
	}
	return s.claimAWS(q.Get("X-Amz-Algorithm"), q.Get("X-Amz-Credential"), q.Get("X-Amz-SignedHeaders"), true)
}

// claimAWS asks credd for the key behind a signature's credential: "tgo_…/20260131/region/service/aws4_request".
func (s *swap) claimAWS(algorithm, credential, signed string, presigned bool) *refusal {
	token := tokenshape.First(credential)
	if token == "" {
		return nil
	}
	at := wire.Presentation{As: wire.AsSigV4}
	parts := strings.Split(credential, "/")
	switch {
	case algorithm != awsAlgorithm:
		return s.x.stray(token, at, "a signature of the kind "+clip(algorithm, 40)+", which cannot be made anew: have the client sign with "+awsAlgorithm)
	case len(parts) != 5 || len(parts[0]) != tokenshape.Len || !awsWord(parts[2]) || !awsWord(parts[3]):
		return s.x.stray(token, at, "the scope of the signature is not TOKEN/DATE/REGION/SERVICE/aws4_request")
	case hasChunkSignatures(s.r.Header):
		return s.x.stray(token, at, "each chunk of the body is signed with the key, which cannot be done anew: have the client send "+awsUnsigned+", "+awsUnsignedIn+" or the hash of the body")
	}
	reply, why := s.ask(token, at)
	if why != nil {
		return why
	}
	if reply.Present.As != wire.AsSigV4 || reply.Present.User == "" {
		return &refusal{reason.TokenScope, "secret " + reply.Secret + " is no key that requests are signed with", s.x.rule}
	}
	s.aws = &awsScope{reply: reply, region: parts[2], service: parts[3], signed: strings.Split(lowerASCII(signed), ";"), presigned: presigned}
	for _, name := range []string{"Authorization", "X-Amz-Date", "X-Amz-Security-Token"} {
		s.r.Header.Del(name)
	}
	if presigned {
		s.r.URL.RawQuery = withoutSignature(s.r.URL.RawQuery)
	}
	return nil
}

// hasChunkSignatures says whether a body comes in chunks that are signed one by one.
func hasChunkSignatures(h http.Header) bool {
	hash := h.Get(awsHash)
	return strings.HasPrefix(hash, awsChunkwise) && hash != awsUnsignedIn
}

// awsWord says whether text can be a region or a service.
func awsWord(text string) bool {
	return text != "" && len(text) <= 64 && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
}

// withoutSignature takes the parameters of a signature out of a query.
func withoutSignature(query string) string {
	var kept []string
	for pair := range strings.SplitSeq(query, "&") {
		name, _, _ := strings.Cut(pair, "=")
		switch unescape(name) {
		case "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Signature", "X-Amz-Security-Token":
		default:
			kept = append(kept, pair)
		}
	}
	return strings.Join(kept, "&")
}

// signAWS signs a request whose signature was taken off.
func (s *swap) signAWS() *refusal {
	if s.aws == nil {
		return nil
	}
	hash, why := s.payloadHash()
	if why != nil {
		return why
	}
	r := s.r
	if _, err := url.ParseQuery(r.URL.RawQuery); err != nil {
		return &refusal{reason.AmbiguousHTTP, "the query cannot be read in one way, as signing it needs", s.x.rule}
	}
	signed := s.toSign()
	signer := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = s.aws.service == "s3" }) // a signer keeps the keys that it made
	key := aws.Credentials{AccessKeyID: s.aws.reply.Present.User, SecretAccessKey: s.aws.reply.Value, SessionToken: s.aws.reply.SessionToken}
	if err := signer.SignHTTP(context.Background(), key, signed, hash, s.aws.service, s.aws.region, time.Now()); err != nil {
		return &refusal{reason.Internal, "signing the request: " + oneLine(err), s.x.rule}
	}
	r.Header["Authorization"], r.Header["X-Amz-Date"] = signed.Header["Authorization"], signed.Header["X-Amz-Date"]
	if with := s.aws.reply.SessionToken; with != "" { // of temporary keys
		r.Header.Set("X-Amz-Security-Token", with)
		s.x.swapped = append(s.x.swapped, secret{s.aws.reply.Secret, with})
	}
	r.URL.RawQuery = signed.URL.RawQuery // in the order and spelling that were signed
	if _, signature, ok := strings.Cut(r.Header.Get("Authorization"), "Signature="); ok {
		s.x.swapped = append(s.x.swapped, secret{s.aws.reply.Secret, signature}) // errors of AWS show it
	}
	return nil
}

// toSign returns a request with no more than what the signature covers: what the HTTP client may change on the way is
// left out.
func (s *swap) toSign() *http.Request {
	out := &http.Request{
		Method: s.r.Method, Host: s.r.Host, Header: http.Header{}, ContentLength: s.r.ContentLength,
		URL: &url.URL{Scheme: s.r.URL.Scheme, Host: s.r.URL.Host, Path: s.r.URL.Path, RawPath: s.r.URL.RawPath, RawQuery: s.r.URL.RawQuery},
	}
	if s.aws.service == "s3" { // which decodes the path once and encodes it in its own way
		out.URL.RawPath = httpbinding.EscapePath(s.r.URL.Path, false)
	}
	if out.ContentLength < 0 || len(s.r.Trailer) > 0 {
		out.ContentLength = 0 // nothing says how long it is
	}
	for name, values := range s.r.Header {
		lower := lowerASCII(name)
		switch lower {
		case "accept-encoding", "connection", "content-length", "te", "trailer", "upgrade", "user-agent", "host":
			continue
		}
		if strings.HasPrefix(lower, "x-amz-") || lower == "content-type" || lower == "content-md5" || slices.Contains(s.aws.signed, lower) {
			out.Header[name] = values
		}
	}
	return out
}

// payloadHash returns what the signature says about the body, which is read where the kid has not said so.
func (s *swap) payloadHash() (string, *refusal) {
	hash := s.r.Header.Get(awsHash)
	switch {
	case hash == awsUnsigned || hash == awsUnsignedIn:
		return hash, nil
	case hash != "" && !s.changed:
		return hash, nil // the service compares it with the body
	case s.aws.presigned && s.aws.service == "s3":
		hash = awsUnsigned
	default:
		var why *refusal
		if hash, why = s.bodyHash(); why != nil {
			return "", why
		}
	}
	if s.aws.service == "s3" || s.r.Header.Get(awsHash) != "" { // S3 wants to be told
		s.r.Header.Set(awsHash, hash)
	}
	return hash, nil
}

func (s *swap) bodyHash() (string, *refusal) {
	if s.r.Body != nil && s.r.Body != http.NoBody && !s.whole {
		if why := s.read(maxSignBody); why != nil {
			return "", why
		}
		if !s.whole {
			return "", &refusal{reason.TokenScope, "the body is longer than " + strconv.Itoa(maxSignBody>>20) + " MiB and its hash is not given, so that it cannot be signed: have the client send " + awsHash, s.x.rule}
		}
		if why := s.replay(); why != nil {
			return "", why
		}
	}
	sum := sha256.Sum256(s.body)
	return hex.EncodeToString(sum[:]), nil
}
