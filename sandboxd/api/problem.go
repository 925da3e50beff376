package api

import (
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// Problem is a refusal in the form of RFC 9457.
type Problem struct{ wire.Problem }

func (p *Problem) Error() string { return p.Detail }

// GetStatus returns the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType implements huma.ContentTypeFilter.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

func problem(status int, code reason.Code, detail string) *Problem {
	return &Problem{wire.Problem{Title: http.StatusText(status), Status: status, Detail: detail, Reason: code}}
}

// huma keeps in variables of its own how errors look; they are set once, before any API is made.
func init() {
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		texts := []string{msg}
		for _, err := range errs {
			if err != nil {
				texts = append(texts, err.Error())
			}
		}
		code := reason.Malformed // what huma itself refuses is the request's form
		if status >= http.StatusInternalServerError {
			code = reason.Internal
		}
		return problem(status, code, strings.Join(texts, ": "))
	}
}

var statuses = map[kids.Kind]int{
	kids.Invalid:     http.StatusUnprocessableEntity,
	kids.NotFound:    http.StatusNotFound,
	kids.Conflict:    http.StatusConflict,
	kids.Tagged:      http.StatusLocked,
	kids.Unavailable: http.StatusServiceUnavailable,
	kids.Capacity:    http.StatusInsufficientStorage,
	kids.TooLarge:    http.StatusRequestEntityTooLarge,
}

// refused turns a refusal of the manager into a problem.
func refused(err error) error {
	status, ok := statuses[kids.KindOf(err)]
	if !ok {
		status = http.StatusInternalServerError
	}
	return problem(status, kids.ReasonOf(err), err.Error())
}

// refuse is refused for plain handlers.
func refuse(w http.ResponseWriter, err error) {
	p, _ := refused(err).(*Problem)
	control.Refuse(w, p.Status, p.Reason, p.Detail)
}
