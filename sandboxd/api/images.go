package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/kids"
)

// Images are what kids can run on.
type Images interface {
	List() ([]store.Image, error)
	Pull(ctx context.Context, actor string, local bool, r wire.PullRequest, tell func(line string)) (store.Manifest, error)
	Import(ctx context.Context, name, actor string, l wire.ImageLimits, archive io.Reader) (store.Manifest, error)
	Build(ctx context.Context, actor string, r wire.BuildRequest, tell func(line string)) (store.Manifest, error)
	Remove(name, actor string) error
	Sweep(actor string) (store.Swept, error)
}

// ImageFrame is one line of the answer while an image is made: progress, or the end, which is the image or a problem.
type ImageFrame struct {
	Progress string          `json:"progress,omitempty"`
	Image    *store.Manifest `json:"image,omitempty"`
	Problem  *wire.Problem   `json:"problem,omitempty"`
}

// ImageNamed is a request about one image.
type ImageNamed struct {
	Image string `path:"image" doc:"The image's name."`
}

func (s *server) imageRoutes() {
	add(s, route{id: "list-images", method: http.MethodGet, path: "/v1/images", summary: "List the images, by name and id; replaced ones that kids still use among them", role: RoleRead}, s.listImages)
	add(s, route{id: "get-image", method: http.MethodGet, path: "/v1/images/{image}", summary: "The image that has the name now", role: RoleRead}, s.getImage)
	frames := stream{out: ImageFrame{}, kind: "application/x-ndjson"}
	pull, build := frames, frames
	pull.in, build.in = wire.PullRequest{}, wire.BuildRequest{}
	addStream(s, route{id: "pull-image", method: http.MethodPost, path: "/v1/images/pull", summary: "Fetch an image from a registry; one JSON frame a line, the last one has image or problem", role: RoleImages}, pull, s.pullImage)
	addStream(s, route{id: "build-image", method: http.MethodPost, path: "/v1/images/build", summary: "Build an image of Debian packages, in kids; one JSON frame a line, the last one has image or problem", role: RoleImages}, build, s.buildImage)
	add(s, route{id: "sweep-images", method: http.MethodPost, path: "/v1/images/gc", summary: "Remove images that were replaced and that no kid uses, and leftovers", role: RoleImages}, s.sweepImages)
	addStream(s, route{id: "import-image", method: http.MethodPut, path: "/v1/images/{image}", summary: "Unpack an image: an archive of an OCI layout, what docker save wrote, or an archive of a root filesystem", role: RoleImages},
		stream{inType: "application/x-tar", out: store.Manifest{}, kind: "application/json", raw: true, params: []*huma.Param{
			pathParam("image", "What cards will call it."), countParam("max_bytes", "Most bytes that its files may have."), countParam("max_files", "Most files that its layers may have."),
		}}, s.importImage)
	add(s, route{id: "remove-image", method: http.MethodDelete, path: "/v1/images/{image}", summary: "Remove an image that no kid uses; one that is not there is gone already", role: RoleImages, status: http.StatusNoContent}, s.removeImage)
}

func countParam(name, doc string) *huma.Param {
	zero := 0.0
	return &huma.Param{Name: name, In: "query", Description: doc, Schema: &huma.Schema{Type: huma.TypeInteger, Format: "int64", Minimum: &zero}}
}

func imageKey(i store.Image) string { return i.Name + "/" + i.ID }

func (s *server) listImages(_ context.Context, in *Page) (*listed[store.Image], error) {
	all, err := s.images.List()
	if err != nil {
		return nil, imageRefused(err)
	}
	slices.SortFunc(all, func(a, b store.Image) int { return strings.Compare(imageKey(a), imageKey(b)) })
	return cut(in, all, imageKey), nil
}

type imageReply struct{ Body store.Image }

func (s *server) getImage(_ context.Context, in *ImageNamed) (*imageReply, error) {
	all, err := s.images.List()
	if err != nil {
		return nil, imageRefused(err)
	}
	for _, i := range all {
		if i.Name == in.Image && i.Current {
			return &imageReply{i}, nil
		}
	}
	return nil, imageRefused(store.ErrUnknown)
}

func (s *server) pullImage(w http.ResponseWriter, r *http.Request) {
	var req wire.PullRequest
	if !control.Read(w, r, &req) {
		return
	}
	s.makeImage(w, func(tell func(string)) (store.Manifest, error) {
		return s.images.Pull(r.Context(), actor(r.Context()), CallerOf(r.Context()).Local, req, tell)
	})
}

func (s *server) buildImage(w http.ResponseWriter, r *http.Request) {
	var req wire.BuildRequest
	if !control.Read(w, r, &req) {
		return
	}
	s.makeImage(w, func(tell func(string)) (store.Manifest, error) {
		return s.images.Build(r.Context(), actor(r.Context()), req, tell)
	})
}

// makeImage answers with frames. The answer begins with the first of them, so that an early refusal can still have its own
// status; a later one is not kept for repeats of the request, and of a success the last frame is.
func (s *server) makeImage(w http.ResponseWriter, do func(tell func(string)) (store.Manifest, error)) {
	var out *control.Stream
	send := func(f ImageFrame) {
		if out == nil {
			out = control.NewStream(w)
		}
		out.Send(f) // the peer is gone: its context ends
	}
	m, err := do(func(line string) { send(ImageFrame{Progress: line}) })
	switch {
	case err == nil:
		keepFromHere(w)
		send(ImageFrame{Image: &m})
	case out == nil:
		p := imageRefused(err)
		control.Refuse(w, p.Status, p.Reason, p.Detail)
	default:
		disown(w)
		send(ImageFrame{Problem: &imageRefused(err).Problem})
	}
}

func (s *server) importImage(w http.ResponseWriter, r *http.Request) {
	var l wire.ImageLimits
	var err error
	if text := r.URL.Query().Get("max_bytes"); text != "" {
		l.MaxBytes, err = strconv.ParseInt(text, 10, 64)
	}
	if text := r.URL.Query().Get("max_files"); text != "" && err == nil {
		l.MaxFiles, err = strconv.Atoi(text)
	}
	if err != nil || l.MaxBytes < 0 || l.MaxFiles < 0 {
		control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, "max_bytes, max_files: write numbers from 0 on")
		return
	}
	body := &finite{patient{r: control.WholeBody(r), conn: http.NewResponseController(w)}}
	defer body.end()
	m, err := s.images.Import(r.Context(), r.PathValue("image"), actor(r.Context()), l, body)
	if err != nil {
		p := imageRefused(err)
		if p.Status == http.StatusBadGateway { // the source is the caller
			p.Status = http.StatusUnprocessableEntity
		}
		control.Refuse(w, p.Status, p.Reason, p.Detail)
		return
	}
	control.Reply(w, m)
}

// finite is read to its end before the handler goes on with something that takes long: no deadline may pass meanwhile.
type finite struct{ patient }

func (f *finite) Read(b []byte) (int, error) {
	n, err := f.patient.Read(b)
	if err != nil {
		f.end()
	}
	return n, err
}

func (s *server) removeImage(ctx context.Context, in *ImageNamed) (*struct{}, error) {
	if err := s.images.Remove(in.Image, actor(ctx)); err != nil && !errors.Is(err, store.ErrUnknown) {
		return nil, imageRefused(err)
	}
	return nil, nil
}

type sweptReply struct{ Body store.Swept }

func (s *server) sweepImages(ctx context.Context, _ *struct{}) (*sweptReply, error) {
	swept, err := s.images.Sweep(actor(ctx))
	if err != nil {
		return nil, imageRefused(err)
	}
	return &sweptReply{swept}, nil
}

// imageRefused turns what the store, a source or a build's kid refused into a problem.
func imageRefused(err error) *Problem {
	if kids.KindOf(err) != kids.Internal {
		p, _ := refused(err).(*Problem)
		return p
	}
	status, code := http.StatusInternalServerError, keep.ReasonOf(err)
	switch {
	case errors.Is(err, store.ErrUnknown):
		status = http.StatusNotFound
	case errors.Is(err, store.ErrInUse), errors.Is(err, build.ErrBusy):
		status = http.StatusConflict
	case errors.Is(err, build.ErrTool):
		status = http.StatusServiceUnavailable
	default:
		if s, ok := imageStatuses[code]; ok {
			status = s
		}
	}
	return problem(status, code, err.Error())
}

var imageStatuses = map[reason.Code]int{
	reason.Malformed:      http.StatusUnprocessableEntity,
	reason.TooLarge:       http.StatusRequestEntityTooLarge,
	reason.Capacity:       http.StatusInsufficientStorage,
	reason.DigestMismatch: http.StatusBadGateway,
	reason.PrivateAnswer:  http.StatusForbidden,
	reason.OrderUnsigned:  http.StatusForbidden,
	reason.SourceFailed:   http.StatusBadGateway,
}
