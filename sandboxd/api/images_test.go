package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
	"tagout/sandboxd/kids"
)

// fakeImages panics on an unexpected call.
type fakeImages struct {
	list   func() ([]store.Image, error)
	pull   func(actor string, r wire.PullRequest, tell func(string)) (store.Manifest, error)
	load   func(name, actor string, l wire.ImageLimits, archive io.Reader) (store.Manifest, error)
	build  func(actor string, r wire.BuildRequest, tell func(string)) (store.Manifest, error)
	remove func(name, actor string) error
	sweep  func(actor string) (store.Swept, error)
}

func (f fakeImages) List() ([]store.Image, error) { return f.list() }
func (f fakeImages) Pull(_ context.Context, actor string, _ bool, r wire.PullRequest, tell func(string)) (store.Manifest, error) {
	return f.pull(actor, r, tell)
}
func (f fakeImages) Import(_ context.Context, name, actor string, l wire.ImageLimits, archive io.Reader) (store.Manifest, error) {
	return f.load(name, actor, l, archive)
}
func (f fakeImages) Build(_ context.Context, actor string, r wire.BuildRequest, tell func(string)) (store.Manifest, error) {
	return f.build(actor, r, tell)
}
func (f fakeImages) Remove(name, actor string) error         { return f.remove(name, actor) }
func (f fakeImages) Sweep(actor string) (store.Swept, error) { return f.sweep(actor) }

// TestImageRefusals have a status and a reason code of their own, before the first frame and after it.
func TestImageRefusals(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		code   reason.Code
		upload int // status where the caller is the source; 0: the same
	}{
		{fmt.Errorf("x: %w", store.ErrName), 422, reason.Malformed, 0},
		{fmt.Errorf("x: %w", oci.ErrReference), 422, reason.Malformed, 0},
		{&authority.Refusal{Code: reason.OrderUnsigned, Text: "x"}, 403, reason.OrderUnsigned, 0},
		{fmt.Errorf("x: %w", oci.ErrAddress), 403, reason.PrivateAnswer, 0},
		{fmt.Errorf("x: %w", build.ErrRequest), 422, reason.Malformed, 0},
		{fmt.Errorf("x: %w", store.ErrUnknown), 404, reason.OK, 0},
		{fmt.Errorf("x: %w", store.ErrInUse), 409, reason.ImageInUse, 0},
		{fmt.Errorf("x: %w", build.ErrBusy), 409, reason.Capacity, 0},
		{fmt.Errorf("x: %w", build.ErrTool), 503, reason.SourceFailed, 0},
		{fmt.Errorf("x: %w", unpack.ErrLimit), 413, reason.TooLarge, 0},
		{fmt.Errorf("x: %w", unix.ENOSPC), 507, reason.Capacity, 0},
		{fmt.Errorf("x: %w", keep.ErrBusy), 507, reason.Capacity, 0},
		{fmt.Errorf("x: %w", store.ErrForged), 502, reason.DigestMismatch, 422},
		{errors.New("the registry is gone"), 502, reason.SourceFailed, 422},
		{refusal(kids.Tagged, reason.Tagged), 423, reason.Tagged, 0},
	} {
		early := New(Config{Images: fakeImages{
			pull:  func(string, wire.PullRequest, func(string)) (store.Manifest, error) { return store.Manifest{}, c.err },
			build: func(string, wire.BuildRequest, func(string)) (store.Manifest, error) { return store.Manifest{}, c.err },
			load: func(string, string, wire.ImageLimits, io.Reader) (store.Manifest, error) {
				return store.Manifest{}, c.err
			},
			remove: func(string, string) error { return c.err },
			sweep:  func(string) (store.Swept, error) { return store.Swept{}, c.err },
			list:   func() ([]store.Image, error) { return nil, c.err },
		}})
		upload := c.upload
		if upload == 0 {
			upload = c.status
		}
		gone := c.status
		if gone == http.StatusNotFound {
			gone = http.StatusNoContent // an image that is not there is gone already
		}
		for _, try := range []struct {
			method, target, body string
			status               int
		}{
			{"POST", "/v1/images/pull", `{"name":"a","ref":"r"}`, c.status},
			{"POST", "/v1/images/build", `{"name":"a","suite":"s"}`, c.status},
			{"POST", "/v1/images/gc", "", c.status},
			{"PUT", "/v1/images/a", "tar", upload},
			{"DELETE", "/v1/images/a", "", gone},
			{"GET", "/v1/images", "", c.status},
			{"GET", "/v1/images/a", "", c.status},
		} {
			w := request(early, root, try.method, try.target, "", try.body)
			var p wire.Problem
			if w.Code != try.status {
				t.Errorf("%s %s: %v: %d %s, want %d", try.method, try.target, c.err, w.Code, w.Body, try.status)
			}
			if w.Code == http.StatusNoContent {
				continue
			}
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Reason != c.code || p.Status != w.Code || p.Detail != c.err.Error() || w.Header().Get("Content-Type") != "application/problem+json" {
				t.Errorf("%s %s: %v: %s %v", try.method, try.target, c.err, w.Body, err)
			}
		}
		late := New(Config{Images: fakeImages{pull: func(_ string, _ wire.PullRequest, tell func(string)) (store.Manifest, error) {
			tell("asking")
			return store.Manifest{}, c.err
		}}})
		w := request(late, root, "POST", "/v1/images/pull", "", `{"name":"a","ref":"r"}`)
		frames := frames(t, w.Body)
		if last := frames[len(frames)-1]; w.Code != 200 || len(frames) != 2 || frames[0].Progress != "asking" || last.Problem == nil || last.Problem.Status != c.status || last.Problem.Reason != c.code {
			t.Errorf("%v after progress: %d %+v", c.err, w.Code, frames)
		}
	}
}

func frames(t *testing.T, body io.Reader) []ImageFrame {
	t.Helper()
	var out []ImageFrame
	for dec := json.NewDecoder(body); dec.More(); {
		var f ImageFrame
		if err := dec.Decode(&f); err != nil {
			t.Fatal(err)
		}
		out = append(out, f)
	}
	return out
}

// TestAnImageIsMadeOnce: a repeat with the same key gets the end of the answer, however long its progress was; a failure is
// judged anew, also where it came after the first frame.
func TestAnImageIsMadeOnce(t *testing.T) {
	made, fail := 0, error(nil)
	api := New(Config{Keys: keys(t), Images: fakeImages{build: func(_ string, r wire.BuildRequest, tell func(string)) (store.Manifest, error) {
		made++
		for range 1000 {
			tell(strings.Repeat("progress ", 20))
		}
		return store.Manifest{Name: r.Name, Digest: fmt.Sprintf("sha256:%d", made)}, fail
	}}})
	build := func(key, body string) (int, []ImageFrame) {
		w := request(api, root, "POST", "/v1/images/build", key, body)
		return w.Code, frames(t, w.Body)
	}
	const body = `{"name":"a","suite":"s"}`
	fail = errors.New("half-way")
	if code, f := build("k", body); code != 200 || f[len(f)-1].Problem == nil {
		t.Fatalf("the failure: %d %+v", code, f[len(f)-1])
	}
	fail = nil
	if code, f := build("k", body); code != 200 || len(f) != 1001 || f[1000].Image == nil || made != 2 {
		t.Fatalf("after the failure: %d, %d frames, built %d times", code, len(f), made)
	}
	if code, f := build("k", body); code != 200 || len(f) != 1 || f[0].Image == nil || f[0].Image.Digest != "sha256:2" || made != 2 {
		t.Errorf("a repeat: %d %+v, built %d times", code, f, made)
	}
	if code, _ := build("k", `{"name":"b","suite":"s"}`); code != http.StatusConflict {
		t.Errorf("the key with another body: %d", code)
	}
	if build("", body); made != 3 { // control
		t.Errorf("without a key it was built %d times, want 3", made)
	}
}

// TestWhoMayChangeImages: whoever holds the role, and never an AI agent; those who may read see them.
func TestWhoMayChangeImages(t *testing.T) {
	reached := ""
	api := New(Config{Images: fakeImages{
		list: func() ([]store.Image, error) { reached = "list"; return nil, nil },
		pull: func(actor string, _ wire.PullRequest, _ func(string)) (store.Manifest, error) {
			reached = "pull " + actor
			return store.Manifest{}, nil
		},
		build: func(actor string, _ wire.BuildRequest, _ func(string)) (store.Manifest, error) {
			reached = "build " + actor
			return store.Manifest{}, nil
		},
		load: func(name, actor string, l wire.ImageLimits, archive io.Reader) (store.Manifest, error) {
			raw, err := io.ReadAll(archive)
			reached = fmt.Sprintf("import %s %s %d %d %s", name, actor, l.MaxBytes, l.MaxFiles, raw)
			return store.Manifest{}, err
		},
		remove: func(name, actor string) error { reached = "rm " + name + " " + actor; return nil },
		sweep:  func(actor string) (store.Swept, error) { reached = "gc " + actor; return store.Swept{}, nil },
	}})
	keeper := Caller{Name: "key:ci", Roles: []Role{RoleImages}}
	reader := Caller{Name: "key:r", Roles: []Role{RoleRead, RoleSpawn, RoleExec, RoleFiles, RoleDestroy, RoleGrant}}
	for _, c := range []struct{ method, target, body, want string }{
		{"POST", "/v1/images/pull", `{"name":"a","ref":"r"}`, "pull key:ci"},
		{"POST", "/v1/images/build", `{"name":"a","suite":"s"}`, "build key:ci"},
		{"POST", "/v1/images/gc", "", "gc key:ci"},
		{"PUT", "/v1/images/a?max_bytes=7&max_files=3", "tar", "import a key:ci 7 3 tar"},
		{"DELETE", "/v1/images/a", "", "rm a key:ci"},
	} {
		for _, who := range []struct {
			Caller
			want string
		}{{keeper, c.want}, {reader, ""}, {Caller{Name: "uid:0", Roles: Roles(), Agent: "m"}, ""}, {Caller{}, ""}} {
			reached = ""
			if w := request(api, who.Caller, c.method, c.target, "", c.body); reached != who.want || (who.want == "") != (w.Code == http.StatusForbidden) {
				t.Errorf("%+v %s %s: %d %s, reached %q", who.Caller, c.method, c.target, w.Code, w.Body, reached)
			}
		}
	}
	if request(api, reader, "GET", "/v1/images", "", ""); reached != "list" {
		t.Error("a reader sees no images")
	}
	for _, bad := range []string{"max_bytes=x", "max_files=-1", "max_files=1e9", "max_bytes=99999999999999999999"} {
		reached = ""
		if w := request(api, keeper, "PUT", "/v1/images/a?"+bad, "", "tar"); w.Code != http.StatusUnprocessableEntity || reached != "" {
			t.Errorf("%s: %d, reached %q", bad, w.Code, reached)
		}
	}
}

// TestImagesComeInPages: replaced images too, each once.
func TestImagesComeInPages(t *testing.T) {
	all := []store.Image{}
	for _, id := range []string{"b/2", "a/3", "b/1", "a/4"} {
		name, id, _ := strings.Cut(id, "/")
		all = append(all, store.Image{Manifest: store.Manifest{Name: name, ID: id}, Current: id == "2" || id == "4"})
	}
	api := New(Config{Images: fakeImages{list: func() ([]store.Image, error) { return append([]store.Image{}, all...), nil }}})
	got := ""
	for target := "/v1/images?limit=3"; target != ""; {
		w := request(api, root, "GET", target, "", "")
		var page []store.Image
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != 200 {
			t.Fatalf("%s: %d %s %v", target, w.Code, w.Body, err)
		}
		for _, i := range page {
			got += i.Name + i.ID + " "
		}
		target, _, _ = strings.Cut(strings.TrimPrefix(w.Header().Get("Link"), "<"), ">")
	}
	if got != "a3 a4 b1 b2 " {
		t.Errorf("the pages held %s", got)
	}
	if w := request(api, root, "GET", "/v1/images/a", "", ""); w.Code != 200 || !strings.Contains(w.Body.String(), `"id":"4"`) {
		t.Errorf("the current one: %d %s", w.Code, w.Body)
	}
}
