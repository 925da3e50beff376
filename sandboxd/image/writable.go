package image

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/card"
	"tagout/internal/idmap"
	"tagout/sandboxd/runtime"
)

// LayersDir is the directory, beside a kid's root directory, in which what a kid on the image host+writable wrote lies. It is a
// mount of its own with others below it; unmounting it (lazily) frees all of it.
const LayersDir = "layers"

// WritableName is the name by which cards ask for the image.
const WritableName = card.HostWritable

// Writable is the image host+writable for one kid: the machine's programs and its package database below a throw-away layer
// in memory, in which the kid's root may install packages. Nothing that the kid writes reaches the machine's own files: they
// are lower layers, mounted read-only and shifted into the kid's user namespace.
type Writable struct {
	host   *Host
	userns string
	uid    int   // host uid and gid of the kid's root
	size   int64 // bytes of the layer
}

// WritableFor is the image for the kid whose user namespace is pinned to userns and maps uid to root.
func (h *Host) WritableFor(userns string, uid int, size int64) *Writable {
	return &Writable{host: h, userns: userns, uid: uid, size: size}
}

// Env is root's environment. Package tools ask nobody anything.
func (w *Writable) Env(dir string) map[string]string {
	env := w.host.Env(dir)
	maps.Copy(env, map[string]string{
		"HOME": "/root", "USER": "root", "LOGNAME": "root", "DEBIAN_FRONTEND": "noninteractive",
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/games:/usr/games",
	})
	return env
}

// overlaid are the directories of the machine that lie below the layer, where they are there: programs, and what is known of
// packages that are installed or could be.
func overlaid() []string {
	var out []string
	for _, dir := range []string{"/usr", "/var/lib/dpkg", "/var/lib/apt/lists"} {
		if info, err := os.Lstat(dir); err == nil && info.IsDir() {
			out = append(out, dir)
		}
	}
	return append(out, unmerged()...)
}

// Root makes the root directory at dir and mounts the layer beside it. What it mounted, the caller unmounts, also where it
// fails: dir, and LayersDir beside it.
func (w *Writable) Root(dir, kid string, addr netip.Addr) ([]runtime.Mount, error) {
	fail := func(err error) ([]runtime.Mount, error) {
		return nil, fmt.Errorf("making the writable root filesystem of kid %s: %w", kid, err)
	}
	layers := filepath.Join(filepath.Dir(dir), LayersDir)
	top := filepath.Join(layers, "root")
	if err := w.mountLayer(layers, dir); err != nil {
		return fail(err)
	}
	if err := w.fill(top, kid, addr); err != nil {
		return fail(err)
	}
	mounts, err := w.overlays(layers)
	if err != nil {
		return fail(err)
	}
	if err := w.give(top); err != nil {
		return fail(err)
	}
	if err := unix.Mount(top, dir, "", unix.MS_BIND, ""); err != nil {
		return fail(err)
	}
	return append(mounts, runtime.Mount{Source: w.host.bundle, Target: trustPath}), nil
}

const bytesPerInode = 4096 // as many files as a disk of that size would typically hold

// mountLayer mounts the one file system that bounds all that the kid can write.
func (w *Writable) mountLayer(layers, dir string) error {
	for _, d := range []string{layers, dir} {
		if err := os.Mkdir(d, 0o711); err != nil { // the runtime passes through as the kid's root
			return err
		}
		if err := os.Chmod(d, 0o711); err != nil { // as above
			return err
		}
	}
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0711", w.size, max(w.size/bytesPerInode, 4096))
	if err := unix.Mount("tagout", layers, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mounting its layer: %w", err)
	}
	return makeDir(filepath.Join(layers, "root"))
}

// overlays mounts each overlaid directory of the machine below a part of the layer.
func (w *Writable) overlays(layers string) ([]runtime.Mount, error) {
	var mounts []runtime.Mount
	for i, from := range overlaid() {
		part := filepath.Join(layers, fmt.Sprint("overlay", i))
		lower, upper, work, merged := filepath.Join(part, "lower"), filepath.Join(part, "upper"), filepath.Join(part, "work"), filepath.Join(part, "merged")
		for _, d := range []string{lower, upper, work, merged} {
			if err := makeDir(d); err != nil {
				return nil, err
			}
		}
		if err := os.Chown(upper, w.uid, w.uid); err != nil {
			return nil, err
		}
		if err := idmap.Mount(from, lower, w.userns); err != nil {
			return nil, fmt.Errorf("the image %s needs idmapped mounts: %w", WritableName, err)
		}
		options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work)
		if err := unix.Mount("tagout", merged, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return nil, fmt.Errorf("laying the layer over %s: %w", from, err)
		}
		mounts = append(mounts, runtime.Mount{Source: merged, Target: from, Writable: true})
	}
	return mounts, nil
}

// Part is a directory in the layer of a kid that may write everywhere: In is relative to LayersDir, As what the kid calls it.
type Part struct{ In, As string }

// Parts says where in its layer a kid's own files are; there are none where layers is not there.
func Parts(layers string) []Part {
	if _, err := os.Lstat(layers); err != nil {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(layers, "upper")); err == nil {
		return []Part{{"upper", "/"}} // a workshop's
	}
	out := []Part{{"root", "/"}}
	for i, from := range overlaid() {
		out = append(out, Part{fmt.Sprint("overlay", i, "/upper"), from})
	}
	return out
}

// unmerged are the top-level directories with programs and libraries that are no links into /usr.
func unmerged() []string {
	var out []string
	for _, name := range topNames {
		if info, err := os.Lstat("/" + name); err == nil && info.IsDir() {
			out = append(out, "/"+name)
		}
	}
	return out
}

// fill makes what is not overlaid: links, empty directories, and a small /etc.
func (w *Writable) fill(top, kid string, addr netip.Addr) error {
	dirs, files := runtime.RootFiles()
	dirs = append(dirs, overlaid()...)
	dirs = append(dirs, "/etc/ssl/certs", "/etc/apt/apt.conf.d", "/etc/apt/preferences.d", "/etc/dpkg/dpkg.cfg.d", "/run/lock", "/home", "/root", "/mnt", "/opt", "/srv",
		"/var/tmp", "/var/log/apt", "/var/cache/apt/archives/partial", "/var/cache/debconf", "/var/lib/apt/lists/partial", "/var/mail")
	for _, d := range dirs {
		if err := makeDir(filepath.Join(top, d)); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"var/run": "/run", "var/lock": "/run/lock"} {
		if err := os.Symlink(to, filepath.Join(top, name)); err != nil {
			return err
		}
	}
	if err := copyLinks(top); err != nil {
		return err
	}
	for _, path := range public {
		if err := copyPublic(path, filepath.Join(top, path)); err != nil {
			return fmt.Errorf("copying %s: %w", path, err)
		}
	}
	texts := etc(kid, addr, w.host.gateway)
	texts["etc/passwd"], texts["etc/group"] = accounts("/etc/passwd", texts["etc/passwd"]), accounts("/etc/group", texts["etc/group"])
	texts["etc/apt/apt.conf.d/99tagout"] = aptConf
	texts["etc/fstab"] = ""
	for _, f := range append(files, trustPath) {
		texts[strings.TrimPrefix(f, "/")] = ""
	}
	for name, text := range texts {
		if err := writeFile(filepath.Join(top, name), []byte(text)); err != nil {
			return err
		}
	}
	return errors.Join(os.Chmod(filepath.Join(top, "var/tmp"), os.ModeSticky|0o777), os.Chmod(filepath.Join(top, "root"), 0o700)) // as on any machine
}

// aptConf: apt's own user would need nothing that root here has, and looks for servers by names that no card allows.
const aptConf = `APT::Sandbox::User "root";
APT::Install-Recommends "false";
Acquire::EnableSrvRecords "false";
Acquire::Languages "none";
Dpkg::Use-Pty "false";
`

// copyLinks makes /bin and the like where they are links into /usr.
func copyLinks(top string) error {
	for _, name := range topNames {
		to, err := os.Readlink("/" + name)
		if err != nil {
			continue // not there, or a directory, which is overlaid
		}
		if err := os.Symlink(to, filepath.Join(top, name)); err != nil {
			return err
		}
	}
	return nil
}

// public is what package tools want of the machine's /etc. Only what everybody may read is copied, and nothing that could
// hold a password.
var public = []string{
	"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/debian_version", "/etc/os-release", "/etc/debconf.conf",
	"/etc/adduser.conf", "/etc/deluser.conf", "/etc/ca-certificates.conf", "/etc/shells", "/etc/login.defs", "/etc/dpkg", "/etc/perl",
	"/etc/apt/sources.list", "/etc/apt/sources.list.d", "/etc/apt/trusted.gpg.d", "/etc/apt/keyrings",
}

const maxPublic = 4 << 20 // bytes of one file

// userinfo is a URL with a user's name in it, and maybe a password.
var userinfo = regexp.MustCompile(`://[^/\s]*@`)

// copyPublic copies files, directories and links that everybody may read. What is not there is not an error.
func copyPublic(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch info, err := d.Info(); {
		case err != nil:
			return err
		case d.IsDir() && info.Mode().Perm()&0o005 != 0o005:
			return filepath.SkipDir
		case d.IsDir():
			return makeDir(target)
		case info.Mode()&fs.ModeSymlink != 0:
			return copyLink(path, target)
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o004 == 0 || info.Size() > maxPublic:
			return nil
		default:
			return copyText(path, target)
		}
	})
}

func copyLink(path, target string) error {
	to, err := os.Readlink(path)
	if err != nil {
		return err
	}
	return os.Symlink(to, target)
}

func copyText(path, target string) error {
	raw, err := os.ReadFile(path)
	if err != nil || userinfo.Match(raw) {
		return err
	}
	return writeFile(target, raw)
}

// accounts are the machine's own system users or groups, which packages name, without the people's; those of own win.
func accounts(file, own string) string {
	raw, err := os.ReadFile(file)
	if err != nil {
		return own // a machine without them has no packages that need them
	}
	taken := map[string]bool{}
	for line := range strings.Lines(own) {
		taken[strings.Split(line, ":")[0]] = true
	}
	for line := range strings.Lines(string(raw)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 || taken[f[0]] || len(f[2]) > 3 { // from 1000 on they are people's
			continue
		}
		if len(f) >= 7 {
			f[4], f[6] = "", "/usr/sbin/nologin"
		} else {
			f[3] = "" // who is in a group
		}
		own += strings.Join(f, ":") + "\n"
	}
	return own
}

// give makes everything in top the kid's root's.
func (w *Writable) give(top string) error {
	return filepath.WalkDir(top, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, w.uid, w.uid)
	})
}
