package api

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
)

// Page asks for a part of a list. It goes on after an entry, not at a number: what comes and goes in between
// neither repeats nor hides the others.
type Page struct {
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"1000" doc:"How many entries to return at most."`
	After string `query:"after" maxLength:"4096" doc:"Return what follows this entry; the Link header of a page names it."`

	url url.URL
}

// Resolve implements huma.Resolver.
func (p *Page) Resolve(ctx huma.Context) []error {
	p.url = ctx.URL()
	return nil
}

// listed is a page of a list.
type listed[T any] struct {
	Link string `header:"Link" doc:"With rel=\"next\" (RFC 8288): where the list goes on. Missing on the last page."`
	Body []T
}

// cut returns the part that p asks for of all, which is sorted by id.
func cut[T any](p *Page, all []T, id func(T) string) *listed[T] {
	return cutAfter(p, all, id, func(id string) bool { return id > p.After })
}

// cutAfter is cut for a list in another order: follows says whether an entry comes after the one that p names.
func cutAfter[T any](p *Page, all []T, id func(T) string, follows func(id string) bool) *listed[T] {
	begin := 0
	if p.After != "" {
		begin = slices.IndexFunc(all, func(v T) bool { return follows(id(v)) })
		if begin < 0 {
			begin = len(all)
		}
	}
	out := &listed[T]{Body: all[begin:min(begin+p.Limit, len(all))]}
	if begin+p.Limit < len(all) {
		out.Link = p.next(id(out.Body[len(out.Body)-1]))
	}
	return out
}

// next is the link to the page after the entry.
func (p *Page) next(after string) string {
	q := p.url.Query()
	q.Set("limit", strconv.Itoa(p.Limit))
	q.Set("after", after)
	return fmt.Sprintf(`<%s?%s>; rel="next"`, p.url.Path, q.Encode())
}
