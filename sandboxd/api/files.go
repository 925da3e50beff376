package api

import (
	"context"
	"io"
	"io/fs"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Files is what is in a kid's writable places; *kids.Manager is one.
type Files interface {
	ListFiles(ctx context.Context, name, actor, dir, after string, limit int) (out []wire.File, more bool, err error)
	GetFile(ctx context.Context, name, actor, path string, begin func(wire.File) io.Writer) error
	GetArchive(ctx context.Context, name, actor, path string, skip bool, begin func(left int) io.Writer) error
	PutFile(ctx context.Context, name, actor, path string, mode fs.FileMode, src io.Reader) (wire.Carried, error)
	PutArchive(ctx context.Context, name, actor, path string, src io.Reader) (wire.Carried, error)
}

const tarType = "application/x-tar"

// Headers of files on their way.
const (
	modeHeader = "Tagout-Mode"     // permission bits of a file, octal
	leftHeader = "Tagout-Left-Out" // how many links, FIFOs, sockets and devices an archive leaves out
)

func (s *server) fileRoutes() {
	add(s, route{id: "list-files", method: http.MethodGet, path: "/v1/kids/{kid}/files/list", summary: "List a directory of a kid's writable places", role: RoleFiles}, s.listFiles)
	path := huma.Param{Name: "path", In: "query", Required: true, Description: "Absolute path in the kid, below /workspace or /tmp.", Schema: &huma.Schema{Type: huma.TypeString}}
	archive := huma.Param{Name: "archive", In: "query", Description: "tar: the path is a directory, and the body a tar stream of it.", Schema: &huma.Schema{Type: huma.TypeString, Enum: []any{"tar"}}}
	skip := huma.Param{Name: "skip", In: "query", Description: "special: leave out what is neither a file nor a directory, instead of refusing.", Schema: &huma.Schema{Type: huma.TypeString, Enum: []any{"special"}}}
	mode := huma.Param{Name: "mode", In: "query", Description: "Permission bits of the file, octal; 0644 where not given.", Schema: &huma.Schema{Type: huma.TypeString}}
	addStream(s, route{id: "get-file", method: http.MethodGet, path: "/v1/kids/{kid}/files", summary: "Read a file, or a directory as an archive", role: RoleFiles},
		stream{kind: "application/octet-stream", params: append(kidParam(), &path, &archive, &skip)}, s.getFile)
	addStream(s, route{id: "put-file", method: http.MethodPut, path: "/v1/kids/{kid}/files", summary: "Write a file whole, or unpack an archive", role: RoleFiles},
		stream{inType: "application/octet-stream", kind: "application/json", out: wire.Carried{}, params: append(kidParam(), &path, &archive, &mode), raw: true}, s.putFile)
}

type listFilesRequest struct {
	Named
	Page
	Path string `query:"path" default:"/workspace" maxLength:"4096" doc:"Absolute path in the kid, below /workspace or /tmp."`
}

func (s *server) listFiles(ctx context.Context, in *listFilesRequest) (*listed[wire.File], error) {
	list, more, err := s.kids.ListFiles(ctx, in.Kid, actor(ctx), in.Path, in.After, in.Limit)
	if err != nil {
		return nil, refused(err)
	}
	out := &listed[wire.File]{Body: append([]wire.File{}, list...)}
	if more && len(list) > 0 {
		out.Link = in.next(list[len(list)-1].Name)
	}
	return out, nil
}

func (s *server) getFile(w http.ResponseWriter, r *http.Request) {
	q, begun := r.URL.Query(), false
	out := &patient{w: w, conn: http.NewResponseController(w)}
	defer out.end()
	var err error
	if q.Get("archive") == "tar" {
		err = s.kids.GetArchive(r.Context(), r.PathValue("kid"), actor(r.Context()), q.Get("path"), q.Get("skip") == "special", func(left int) io.Writer {
			begun = true
			w.Header().Set("Content-Type", tarType)
			w.Header().Set(leftHeader, strconv.Itoa(left))
			return out
		})
	} else {
		err = s.kids.GetFile(r.Context(), r.PathValue("kid"), actor(r.Context()), q.Get("path"), func(f wire.File) io.Writer {
			begun = true
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Header().Set("Content-Length", strconv.FormatInt(f.Size, 10))
			w.Header().Set(modeHeader, f.Mode)
			return out
		})
	}
	switch {
	case err != nil && begun:
		panic(http.ErrAbortHandler) // the answer has begun: that it is not whole can only be told by breaking it off
	case err != nil:
		refuse(w, err)
	}
}

func (s *server) putFile(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	body := &patient{r: control.WholeBody(r), conn: http.NewResponseController(w)}
	defer body.end()
	var done wire.Carried
	var err error
	if q.Get("archive") == "tar" {
		done, err = s.kids.PutArchive(r.Context(), r.PathValue("kid"), actor(r.Context()), q.Get("path"), body)
	} else {
		mode := uint64(0o644)
		if text := q.Get("mode"); text != "" {
			if mode, err = strconv.ParseUint(text, 8, 9); err != nil {
				control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, "mode: write permission bits in octal, such as 0644")
				return
			}
		}
		done, err = s.kids.PutFile(r.Context(), r.PathValue("kid"), actor(r.Context()), q.Get("path"), fs.FileMode(mode), body)
	}
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, done)
}

// patience is how long the other end may let a stream of bytes stand still.
const patience = 30 * time.Second

// patient reads or writes for as long as there is progress.
type patient struct {
	r    io.Reader
	w    io.Writer
	conn *http.ResponseController
}

func (p *patient) Read(b []byte) (int, error) {
	p.conn.SetReadDeadline(time.Now().Add(patience)) // a connection without deadlines is a test's
	return p.r.Read(b)
}

func (p *patient) Write(b []byte) (int, error) {
	p.conn.SetWriteDeadline(time.Now().Add(patience)) // as above
	return p.w.Write(b)
}

// end leaves the connection without deadlines, for the next request.
func (p *patient) end() {
	p.conn.SetReadDeadline(time.Time{})  // as above
	p.conn.SetWriteDeadline(time.Time{}) // as above
}
