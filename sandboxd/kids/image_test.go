package kids

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// probeImage is an image with nothing in it but the test's own binary, which is static, and a few files.
type probeImage struct{ t testing.TB }

func (p probeImage) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		mode int64
		uid  int
		data []byte
	}{
		{"bin/probe", 0o4755, 0, binary}, {"data/all", 0o644, 0, []byte("x")}, {"data/roots", 0o600, 0, []byte("x")},
		{"data/kids", 0o600, 1000, []byte("x")}, {"data/others", 0o600, 1001, []byte("x")}, {"data/writable", 0o666, 1000, []byte("x")},
	} {
		if err := tw.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Uid: f.uid, Gid: f.uid, Size: int64(len(f.data)), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		if _, err := tw.Write(f.data); err != nil {
			return err
		}
	}
	m.Kind, m.Source, m.Digest, m.Env = store.KindRootfs, "test", "sha256:00", map[string]string{"GREETING": "from the image", "FROM_IMAGE": "yes", "SSL_CERT_FILE": "/elsewhere"}
	return errors.Join(tw.Close(), u.Layer(ctx, &out))
}

// addProbeImage puts the image into the box's store.
func (b *box) addProbeImage(name string) *store.Store {
	b.t.Helper()
	s, err := store.Open(b.inst.ImageDir(), filepath.Dir(b.inst.KidDir("x")))
	if err == nil {
		_, _, err = s.Add(b.t.Context(), name, probeImage{b.t}, unpack.DefaultLimits())
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// lookAtImage is what the probe sees inside.
func lookAtImage() map[string]string {
	out := map[string]string{}
	for _, path := range []string{"/bin/probe", "/data/roots", "/data/kids", "/data/others"} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			out["owner "+path] = err.Error()
			continue
		}
		out["owner "+path] = fmt.Sprintf("%d:%d %o", st.Uid, st.Gid, st.Mode&0o7777)
	}
	for _, path := range []string{"/data/all", "/data/roots", "/data/kids", "/data/others"} {
		_, err := os.ReadFile(path)
		out["read "+path] = name(err)
	}
	for _, path := range []string{"/data/writable", "/bin/probe", "/x", "/etc/passwd", "/etc/hosts", "/dev/x", "/tmp/x", "/workspace/x", "/dev/shm/x"} {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		out["write "+path] = name(err)
		f.Close() // nil is harmless
	}
	for _, path := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/passwd", "/proc/self/mountinfo"} {
		raw, _ := os.ReadFile(path) // missing is empty
		out[path] = string(raw)
	}
	for _, dir := range []string{"/", "/usr", "/var", "/sys"} {
		var names []string
		entries, _ := os.ReadDir(dir) // missing is empty
		for _, e := range entries {
			names = append(names, e.Name())
		}
		out["ls "+dir] = strings.Join(names, " ")
	}
	for _, name := range []string{"GREETING", "FROM_IMAGE", "SSL_CERT_FILE", "HOME"} {
		out["$"+name] = os.Getenv(name)
	}
	return out
}

// inImage runs the image's probe.
func (b *box) inImage(kid, what string) map[string]string {
	b.t.Helper()
	r := b.exec(kid, wire.ExecRequest{Argv: []string{"/bin/probe"}, Env: map[string]string{"TAGOUT_TEST_PROBE": what}})
	var got map[string]string
	if err := json.Unmarshal(r.stdout.Bytes(), &got); err != nil {
		b.t.Fatalf("probe: %v: %s%s %+v", err, r.stdout.String(), r.stderr.String(), r.exit)
	}
	return got
}

func imagePlan(name string) Plan {
	p := plan()
	p.Image = name
	return p
}

// TestKidOnAnImage: the kid sees the image and nothing else, owners are its own namespace's, nothing is writable but the
// usual places, and it is as contained as any kid.
func TestKidOnAnImage(t *testing.T) {
	b := newBox(t, "tsbimage")
	images := b.addProbeImage("probe")
	b.spawn("k1", imagePlan("probe"))
	got := b.inImage("k1", "image")
	for what, want := range map[string]string{
		"owner /bin/probe": "0:0 755", "owner /data/roots": "0:0 600", "owner /data/kids": "1000:1000 600", "owner /data/others": "1001:1001 600",
		"read /data/all": "", "read /data/roots": "EACCES", "read /data/kids": "", "read /data/others": "EACCES",
		"write /data/writable": "EROFS", "write /bin/probe": "EROFS EACCES", "write /x": "EROFS EACCES", "write /etc/passwd": "EROFS EACCES",
		"write /etc/hosts": "EROFS EACCES", "write /dev/x": "EACCES", "write /tmp/x": "", "write /workspace/x": "", "write /dev/shm/x": "",
		"/etc/hostname": "k1\n", "ls /usr": "", "ls /var": "", "ls /sys": "", "ls /": ".tagout bin data dev etc proc tmp workspace",
		"$GREETING": "hello", "$FROM_IMAGE": "yes", "$SSL_CERT_FILE": store.TrustPath, "$HOME": "/workspace",
	} {
		if got[what] != want && (want == "" || !slices.Contains(strings.Fields(want), got[what])) {
			t.Errorf("%s: %q, want %q", what, got[what], want)
		}
	}
	if !strings.Contains(got["/etc/resolv.conf"], "nameserver "+b.inst.Gateway().String()) || !strings.Contains(got["/etc/passwd"], "kid:x:1000:1000:") {
		t.Errorf("resolv.conf %q, passwd %q", got["/etc/resolv.conf"], got["/etc/passwd"])
	}
	root, _, _ := strings.Cut(got["/proc/self/mountinfo"], "\n")
	for _, want := range []string{" / ro,", "nosuid", "nodev", "idmapped"} {
		if !strings.Contains(root, want) {
			t.Errorf("root mount %q: want %q", root, want)
		}
	}
	for attack, errno := range b.inImage("k1", "attacks") {
		if errno == "" && !slices.Contains([]string{"socket inet", "socket unix", "socket netlink", "socketpair unix"}, attack) {
			t.Errorf("%s succeeded", attack)
		}
	}
	b.secondKidOnImage(images)
}

// secondKidOnImage: two kids share the image, each with owners of its own; it cannot be removed before both are gone.
func (b *box) secondKidOnImage(images *store.Store) {
	b.t.Helper()
	b.spawn("k2", imagePlan("probe"))
	if got := b.inImage("k2", "image"); got["read /data/kids"] != "" || got["owner /data/kids"] != "1000:1000 600" {
		b.t.Errorf("second kid: %v", got["owner /data/kids"])
	}
	for _, kid := range []string{"k1", "k2"} {
		if _, err := images.Remove("probe"); !errors.Is(err, store.ErrInUse) {
			b.t.Errorf("removing the image while %s lives: %v", kid, err)
		}
		if err := b.Destroy(b.t.Context(), kid, "test", "test"); err != nil {
			b.t.Fatal(err)
		}
	}
	if left := b.mounts(); len(left) != 0 {
		b.t.Errorf("after the kids there are mounts: %v", left)
	}
	if _, err := images.Remove("probe"); err != nil {
		b.t.Error(err)
	}
	if _, err := b.Spawn(b.t.Context(), Request{Purpose: "test", Plan: imagePlan("probe")}); KindOf(err) != Invalid {
		b.t.Errorf("spawning on an image that is gone: %v", err)
	}
}

// TestImageSpawnsThatFail at every step, before and after it took effect, leave no mount and no hold on the image.
func TestImageSpawnsThatFail(t *testing.T) {
	b := newBox(t, "tsbimgf")
	images := b.addProbeImage("probe")
	var names []string
	for _, s := range b.steps() {
		names = append(names, s.name)
	}
	for _, step := range names[slices.Index(names, "files"):] {
		for _, done := range []bool{false, true} {
			b.fault = func(at string, after bool) error {
				if at == step && after == done {
					return errors.New("injected")
				}
				return nil
			}
			if _, err := b.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: imagePlan("probe")}); err == nil {
				t.Errorf("step %s: no error", step)
			}
			if left := b.mounts(); len(left) != 0 {
				t.Errorf("step %s (done %v): mounts %v", step, done, left)
			}
		}
	}
	if _, err := images.Remove("probe"); err != nil {
		t.Error(err)
	}
}

// TestKilledSandboxdWithImages: the successor goes on with the image that a kid began with, also when the name is another
// image's by now, and unmounts what a half-made kid had.
func TestKilledSandboxdWithImages(t *testing.T) {
	b := newBox(t, "tsbimgk")
	b.addProbeImage("probe")
	t.Setenv("TAGOUT_TEST_IMAGE", "probe")
	doom(t, b)
	images := b.addProbeImage("probe")
	if list, err := images.List(); err != nil || len(list) != 2 || len(list[1].UsedBy) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	if half := b.inst.KidDir("half"); !strings.Contains(strings.Join(b.mounts(), " "), half+"/root") {
		t.Fatalf("the half-made kid has no root: the rest proves little: %v", b.mounts())
	}
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := b.inImage("whole", "image"); got["read /data/kids"] != "" || got["$FROM_IMAGE"] != "yes" {
		t.Errorf("exec in the adopted kid: %v", got)
	}
	if list, err := images.List(); err != nil || len(list) != 2 || !slices.Equal(list[1].UsedBy, []string{"whole"}) {
		t.Errorf("after the half-made kid: %+v, %v", list, err)
	}
	if err := b.Destroy(t.Context(), "whole", "test", "test"); err != nil {
		t.Fatal(err)
	}
	if swept, err := images.Sweep(); err != nil || len(swept.Images) != 1 {
		t.Errorf("swept %+v, %v", swept, err)
	}
	b.wantNothingLeft()
}
