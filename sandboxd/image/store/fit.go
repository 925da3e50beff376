package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"tagout/sandboxd/image/unpack"
	"tagout/sandboxd/runtime"
)

// Files that every kid gets in the place of the image's own; Fit makes sure that they can be mounted over.
const (
	ResolvConf = "/etc/resolv.conf"
	Hosts      = "/etc/hosts"
	Hostname   = "/etc/hostname"
	TrustPath  = "/etc/ssl/certs/ca-certificates.crt" // Debian's place
)

const maxAccounts = 1 << 20 // bytes of a passwd or group file

// fit adds what a kid needs of a root filesystem that is read-only: places to mount on, and the kid's own accounts. A link
// or anything else in such a place is replaced.
func fit(u *unpack.Unpacker) error {
	fail := func(err error) error { return fmt.Errorf("fitting it for kids: %w", err) }
	dirs, files := runtime.RootFiles()
	for _, dir := range dirs {
		if err := u.Dir(dir); err != nil {
			return fail(err)
		}
	}
	for _, file := range append(files, ResolvConf, Hosts, Hostname, TrustPath) {
		if err := u.File(file); err != nil {
			return fail(err)
		}
	}
	err := errors.Join(
		addAccounts(u, "/etc/passwd", fmt.Sprintf("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"+
			"tagout-init:x:%[1]d:%[1]d::/:/bin/false\nkid:x:%[2]d:%[2]d:kid:%[3]s:/bin/sh\n", runtime.InitUID, runtime.KidUID, runtime.Home)),
		addAccounts(u, "/etc/group", fmt.Sprintf("root:x:0:\nnogroup:x:65534:\ntagout-init:x:%d:\nkid:x:%d:\n", runtime.InitUID, runtime.KidUID)),
	)
	if err != nil {
		return fail(err)
	}
	return nil
}

// addAccounts adds lines whose names and numbers the file has not.
func addAccounts(u *unpack.Unpacker, path, lines string) error {
	old, err := u.Read(path, maxAccounts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var names, ids []string
	for line := range strings.Lines(string(old)) {
		if f := strings.Split(line, ":"); len(f) > 2 {
			names, ids = append(names, f[0]), append(ids, f[2])
		}
	}
	out := bytes.TrimRight(old, "\n")
	if len(out) > 0 {
		out = append(out, '\n')
	}
	for line := range strings.Lines(lines) {
		f := strings.Split(line, ":")
		if !slices.Contains(names, f[0]) && !slices.Contains(ids, f[2]) {
			out = append(out, line...)
		}
	}
	return u.Write(path, out)
}
