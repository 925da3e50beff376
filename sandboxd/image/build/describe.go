package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"tagout/sandboxd/image/store"
)

// maxDescription bounds what the first kid says of its packages and sources: a Release file of Debian's has some 200 KB.
const maxDescription = 16 << 20

// describe reads what describe.sh wrote.
func describe(text string, sources []Source, wanted []string) (*store.Build, error) {
	out := &store.Build{Wanted: append([]string{}, wanted...)}
	for _, s := range sources {
		out.Sources = append(out.Sources, store.BuildSource{URL: s.URL, Suite: s.Suite, Components: s.Components})
	}
	var of *store.BuildSource // whose Release file the lines are
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) == 4 && f[0] == "package":
			out.Packages = append(out.Packages, store.Package{Name: f[1], Version: f[2], Arch: f[3]})
		case len(f) == 2 && f[0] == "release":
			of = nil
			for i, s := range sources {
				if strings.HasPrefix(f[1], s.list()) && of == nil {
					of = &out.Sources[i]
				}
			}
		case of != nil:
			of.Note(f)
		}
	}
	if len(out.Packages) == 0 {
		return nil, errors.New("there are none")
	}
	slices.SortFunc(out.Packages, func(a, b store.Package) int { return strings.Compare(a.Name+":"+a.Arch, b.Name+":"+b.Arch) })
	return out, nil
}

// list begins the names of the files in which apt keeps the source's Release file (sources.list(5)).
func (s Source) list() string {
	_, rest, _ := strings.Cut(s.URL, "://")
	quoted := strings.NewReplacer("_", "%5f", "~", "%7e").Replace(rest)
	return strings.ReplaceAll(quoted, "/", "_") + "_dists_" + s.Suite + "_"
}

// maxRelease bounds a Release file.
const maxRelease = 4 << 20

// Newer says whether the sources of a built image have other lists of packages by now. Nobody's signature is checked: an
// answer that is wrong makes a warning wrong, and nothing else.
func Newer(ctx context.Context, b *store.Build, client *http.Client) (bool, error) {
	for _, s := range b.Sources {
		if len(s.Indexes) == 0 {
			return false, fmt.Errorf("what %s had is not known", s.URL)
		}
		now, err := release(ctx, s, client)
		if err != nil {
			return false, fmt.Errorf("asking %s: %w", s.URL, err)
		}
		for name, sum := range s.Indexes {
			if now.Indexes[name] != sum {
				return true, nil
			}
		}
	}
	return false, nil
}

// release asks a source for its Release file.
func release(ctx context.Context, s store.BuildSource, client *http.Client) (store.BuildSource, error) {
	out := store.BuildSource{Components: s.Components}
	var errs []error
	for _, name := range []string{"InRelease", "Release"} {
		text, err := get(ctx, client, s.URL+"/dists/"+s.Suite+"/"+name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for line := range strings.Lines(text) {
			out.Note(strings.Fields(line))
		}
		return out, nil
	}
	return out, errors.Join(errs...)
}

func get(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close() // only read
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", url, resp.Status)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxRelease))
	return string(raw), err
}
