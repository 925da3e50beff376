// Package api serves sandboxd's routes: kids' life, over HTTP, described in OpenAPI by the code itself. Each route
// names the role that a caller needs; over the unix socket only root may call, because whoever makes or enters kids
// could read what is in them.
//
// A new route is added with add, or with addStream where its answer is no JSON document; `make openapi` then writes
// deploy/schema/openapi.json, which a test compares.
package api

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"sync/atomic"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/execsocket"
	"tagout/internal/reason"
	"tagout/internal/tally"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/once"
)

// Version of the API: the first part of every path.
const Version = "v1"

// Kids is what the routes call; *kids.Manager is one.
type Kids interface {
	Spawn(ctx context.Context, r kids.Request) (wire.Kid, error)
	Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error
	Destroy(ctx context.Context, name, actor, why string) error
	DestroyWithLesson(ctx context.Context, name, actor, why, lesson string) (file string, err error)
	CredentialUse(ctx context.Context, name string) *wire.CredentialUse
	Commands
	Lives
	Files
	Get(ctx context.Context, name string) (wire.Kid, error)
	List(ctx context.Context) []wire.Kid
	ChangePolicy(ctx context.Context, name string, c kids.EgressChange) (wire.PolicyReply, error)
	PolicyRefused(name, actor, by string, why error)
	Grant(ctx context.Context, name, actor string, r wire.GrantRequest, sig kids.Signature) (wire.Grant, error)
	Ungrant(ctx context.Context, name, id, actor, by, why string, sig kids.Signature) error
	Grants(name string) ([]wire.Grant, error)
}

// Planner turns a card into a plan. Its error says what is wrong with the card, with line and column.
type Planner func(r wire.SpawnRequest) (kids.Plan, error)

// EgressPlanner turns a card into the egress policy of a living kid. Its error is like Planner's.
type EgressPlanner func(r wire.PolicyRequest) (kids.EgressChange, error)

// Config is what the routes need.
type Config struct {
	Kids       Kids
	Plan       Planner
	PlanEgress EgressPlanner
	Images     Images
	Orders     Orders
	Lessons    Lessons
	Keys       *once.Store // nil: Idempotency-Key is not looked at, for tests
	Log        *slog.Logger
	Audit      Recorder        // nil: calls over the unix socket are not recorded, for tests
	Logs       string          // directory of the audit logs
	Ending     <-chan struct{} // closed when sandboxd ends

	origin func(*http.Request) bool // execsocket.SameOrigin, but in tests
}

// Orders judges who may change what a kid can reach. Errors are an *authority.Refusal, and on record.
type Orders interface {
	// Accept judges a signed order and marks it as used, on disk, before it returns nil.
	Accept(note []byte, peer string) (authority.Signed, error)
	// Unsigned says whether the named person may open something without a signature.
	Unsigned(by, kid, peer string) error
	// Spawn judges a request for a kid: the order that came with it, or that none came. It marks the order as used.
	Spawn(r wire.SpawnRequest, peer string) (authority.Signed, error)
	// Approve judges the approval that came with a request for a kid on the machine's network, or that none came. It marks
	// the approval as used, on disk, before it returns nil.
	Approve(r wire.SpawnRequest, peer string) (authority.Signed, error)
}

// server is what the handlers share.
type server struct {
	api        huma.API
	kids       Kids
	plan       Planner
	planEgress EgressPlanner
	images     Images
	orders     Orders
	lessons    Lessons
	keys       *once.Store
	log        *slog.Logger
	audit      Recorder
	logs       string
	followers  atomic.Int32 // clients that follow events
	ending     <-chan struct{}
	origin     func(*http.Request) bool // whether the web page that asks may
}

// API is the routes, for callers whom somebody else has recognised (WithCaller).
type API struct {
	http.Handler
	doc       *huma.OpenAPI
	audit     Recorder
	questions *tally.Tally // over the unix socket
}

// New makes the routes.
func New(cfg Config) *API {
	mux := http.NewServeMux()
	s := &server{
		api: humago.New(mux, config()), kids: cfg.Kids, plan: cfg.Plan, planEgress: cfg.PlanEgress, images: cfg.Images, orders: cfg.Orders, lessons: cfg.Lessons,
		keys: cfg.Keys, log: cfg.Log, audit: cfg.Audit, logs: cfg.Logs, ending: cfg.Ending, origin: cfg.origin,
	}
	if s.origin == nil {
		s.origin = execsocket.SameOrigin
	}
	s.api.OpenAPI().Components.Schemas.RegisterTypeAlias(reflect.TypeFor[wire.Problem](), reflect.TypeFor[Problem]())
	s.kidRoutes()
	s.execRoutes()
	s.socketRoutes()
	s.lifeRoutes()
	s.fileRoutes()
	s.imageRoutes()
	s.policyRoutes()
	s.orderRoutes()
	s.toolRoutes()
	s.eventRoutes()
	s.lessonRoutes()
	s.logRoutes()
	s.documentRoute()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		status := http.StatusNotFound
		if others := methodsOf(mux, r); len(others) > 0 {
			status = http.StatusMethodNotAllowed
			w.Header().Set("Allow", strings.Join(others, ", ")) // RFC 9110, 15.5.6
		}
		control.Refuse(w, status, reason.Malformed, "there is no route "+r.Method+" "+r.URL.Path+": GET /v1/openapi.json lists those that there are")
	})
	return &API{Handler: mux, doc: s.api.OpenAPI(), audit: cfg.Audit, questions: tally.New(cfg.Audit, unixLines)}
}

// methodsOf returns the methods in which there is a route for r's path.
func methodsOf(mux *http.ServeMux, r *http.Request) (methods []string) {
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete} {
		other := &http.Request{Method: method, URL: r.URL, Host: r.Host}
		if _, pattern := mux.Handler(other); pattern != "/" {
			methods = append(methods, method)
		}
	}
	return methods
}

// Register serves the routes on mux for root, who comes over the unix socket.
func Register(mux *http.ServeMux, a *API) {
	mux.Handle("/"+Version+"/", fromRoot(recorded(a, a.audit, a.questions)))
}

// Run writes the counts of repeated questions until ctx ends.
func (a *API) Run(ctx context.Context) { a.questions.Run(ctx, tally.Window) }

// config is huma's, without pages that load scripts from elsewhere and without fields that it adds to answers.
func config() huma.Config {
	c := huma.DefaultConfig("Tagout", "1")
	c.Info.Description = "Makes, runs and destroys kids: disposable sandboxes for agents that nobody trusts. See docs/api.md."
	c.OpenAPIPath, c.DocsPath, c.SchemasPath, c.CreateHooks = "", "", "", nil
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"key":         {Type: "http", Scheme: "bearer", Description: "An API key; `tagout apikey add` makes one. Over the unix socket none is needed: root holds every role."},
		"certificate": {Type: "mutualTLS", Description: "A client certificate that the box's configuration gives roles to."},
	}
	return c
}

// Document is the API's OpenAPI 3.1 description, indented, with a line's end.
func (a *API) Document() ([]byte, error) { return document(a.doc) }

func document(doc *huma.OpenAPI) ([]byte, error) {
	raw, err := json.MarshalIndent(doc, "", "  ")
	return append(raw, '\n'), err
}

func (s *server) documentRoute() {
	r := route{id: "openapi", method: http.MethodGet, path: "/v1/openapi.json", summary: "This description", role: RoleRead}
	addStream(s, r, stream{kind: "application/json", out: map[string]any{}}, func(w http.ResponseWriter, _ *http.Request) {
		raw, err := document(s.api.OpenAPI())
		if err != nil {
			control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(raw) // the peer is gone: nothing to do
	})
}
