package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/wire"
)

// operations returns what the description says of every route, by method and path.
func operations(doc *huma.OpenAPI) map[string]*huma.Operation {
	out := map[string]*huma.Operation{}
	for path, item := range doc.Paths {
		for method, op := range map[string]*huma.Operation{
			http.MethodGet: item.Get, http.MethodPost: item.Post, http.MethodPut: item.Put, http.MethodDelete: item.Delete, http.MethodPatch: item.Patch,
		} {
			if op != nil {
				out[method+" "+path] = op
			}
		}
	}
	return out
}

// TestEveryRouteKeepsThePromises of docs/api.md: a version in the path, a role, refusals in the form of RFC 9457 for whoever
// lacks it, an Idempotency-Key on each POST, and pages of each list.
func TestEveryRouteKeepsThePromises(t *testing.T) {
	a := New(Config{Keys: keys(t)})
	ops := operations(a.doc)
	if !strings.HasPrefix(a.doc.OpenAPI, "3.1.") || len(ops) < 30 {
		t.Fatalf("OpenAPI %s with %d routes", a.doc.OpenAPI, len(ops))
	}
	for name, op := range ops {
		has := func(param string) bool {
			return slices.ContainsFunc(op.Parameters, func(p *huma.Param) bool { return p.Name == param })
		}
		if !strings.HasPrefix(op.Path, "/"+Version+"/") {
			t.Errorf("%s: no version", name)
		}
		if len(op.Security) != 2 || !strings.HasPrefix(op.Description, "Role: ") {
			t.Errorf("%s: no role: %v %q", name, op.Security, op.Description)
		}
		if no := op.Responses["default"]; no == nil || no.Content["application/problem+json"] == nil {
			t.Errorf("%s: no problem document", name)
		}
		if post := op.Method == http.MethodPost; has(keyHeader) != post {
			t.Errorf("%s: %s: %v", name, keyHeader, !post)
		}
		if isList(a.doc, op) && (!has("limit") || !has("after")) {
			t.Errorf("%s: a list without pages", name)
		}
		target := strings.NewReplacer("{", "", "}", "").Replace(op.Path)
		w := httptest.NewRecorder()
		a.ServeHTTP(w, httptest.NewRequest(op.Method, target, nil)) // nobody asks
		if w.Code != http.StatusForbidden || w.Header().Get("Content-Type") != "application/problem+json" || !strings.Contains(w.Body.String(), `"reason":"role-missing"`) {
			t.Errorf("%s of nobody: %d %s %s", name, w.Code, w.Header().Get("Content-Type"), w.Body)
		}
		if op.Method != http.MethodPost {
			continue
		}
		if w := request(a, root, op.Method, target, strings.Repeat("k", 256), "{}"); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), keyHeader) {
			t.Errorf("%s with a key that is too long: %d %s: it is not looked at", name, w.Code, w.Body)
		}
	}
}

// fakeLessons has so many lessons, the newest first, two a second.
type fakeLessons []wire.Lesson

func (f fakeLessons) List([]string) ([]wire.Lesson, error) { return f, nil }
func (f fakeLessons) Get(string) (wire.Lesson, error)      { panic("an unexpected call") }

// TestLessonsComeInPages, each once, the newest first.
func TestLessonsComeInPages(t *testing.T) {
	noon := time.Date(2031, 5, 4, 12, 0, 0, 0, time.UTC)
	all := fakeLessons{}
	for i, name := range []string{"e", "d", "c", "b", "a"} {
		all = append(all, wire.Lesson{Name: name, Destroyed: noon.Add(-time.Duration(i/2) * time.Second)})
	}
	a := New(Config{Lessons: all})
	got := ""
	for target, pages := "/v1/lessons?limit=2&words=x", 0; target != "" && pages < 9; pages++ {
		w := request(a, root, http.MethodGet, target, "", "")
		var page []wire.Lesson
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != http.StatusOK {
			t.Fatalf("%s: %d %s", target, w.Code, w.Body)
		}
		for _, l := range page {
			got += l.Name
		}
		target, _, _ = strings.Cut(strings.TrimPrefix(w.Header().Get("Link"), "<"), ">")
	}
	if got != "edcba" {
		t.Errorf("the pages held %s", got)
	}
}

// isList says whether a route answers with a JSON list.
func isList(doc *huma.OpenAPI, op *huma.Operation) bool {
	for status, r := range op.Responses {
		if m := r.Content["application/json"]; status != "default" && m != nil && m.Schema != nil {
			s := m.Schema
			if s.Ref != "" {
				s = doc.Components.Schemas.SchemaFromRef(s.Ref)
			}
			if s.Type == huma.TypeArray {
				return true
			}
		}
	}
	return false
}
