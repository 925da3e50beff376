package bench

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
)

// image is the name of the agent's image in both engines.
const image = "localhost/tagout-bench:latest"

// engine is docker or podman: a command with its options, a root process whose namespaces hold all mounts that come
// and go, directories and a cgroup. All of it lies within the instance, so that a cleanup finds it.
//
// Its root process is born where the site says: for stops, in the network namespace of the practice internet, where no
// link, no filter and no proxy lie between the hostile agent and the sink, so that its last byte comes as early as it
// can.
type engine struct {
	site
	command []string // and its options
	run     []string // options of run
	root    *exec.Cmd
	dir     string // files that last, in the instance's state directory
	tmp     string // sockets and the like, in its run directory
	rel     string // cgroup
	covered string // a directory of the host that the engine sees an empty one of
	made    bool   // covered was made for it
}

// site is where an engine lives.
type site struct {
	inst   instance.Instance
	layout cgroup.Layout
	born   func(fork func() error) error // calls fork on a thread that is in the root process's network namespace
}

func newEngine(at site, name, covered string) (*engine, error) {
	e := &engine{site: at, rel: at.inst.CgroupRel() + "/bench-" + name, covered: covered}
	var err error
	if e.tmp, err = os.MkdirTemp(at.inst.RunDir(), name+"-"); err != nil {
		return nil, err
	}
	if e.dir, err = os.MkdirTemp(at.inst.StateDir(), name+"-"); err != nil {
		return nil, errors.Join(err, os.RemoveAll(e.tmp))
	}
	if err := os.Mkdir(covered, 0o711); err == nil {
		e.made = true
	} else if !errors.Is(err, os.ErrExist) {
		return nil, errors.Join(err, os.RemoveAll(e.tmp), os.RemoveAll(e.dir))
	}
	return e, nil
}

// begin starts a shell line as the engine's root process: with mounts of its own, and in the engine's cgroup.
func (e *engine) begin(line string, unshare ...string) error {
	if err := e.layout.Create(e.rel); err != nil {
		return err
	}
	dir, err := os.Open(e.layout.V2(e.rel))
	if err != nil {
		return err
	}
	defer dir.Close() // only a handle
	args := append([]string{"--mount", "--propagation", "private"}, unshare...)
	e.root = exec.Command("/usr/bin/unshare", append(args, "/bin/sh", "-c", "mount -t tmpfs none \"$0\" && exec "+line, e.covered)...)
	e.root.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	log, err := os.Create(filepath.Join(e.tmp, "log"))
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	e.root.Stdout, e.root.Stderr = log, log
	return e.born(e.root.Start) // a child is born into the namespace of the thread that forks
}

// call runs the engine's command.
func (e *engine) call(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	argv := append(append([]string{}, e.command...), args...)
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		log, _ := os.ReadFile(filepath.Join(e.tmp, "log")) // may be empty
		return fmt.Errorf("%v: %w: %s %s", argv, err, out, log)
	}
	return nil
}

// load makes an image of what fill writes.
func (e *engine) load(ctx context.Context, fill func(*tar.Writer) error) error {
	file := filepath.Join(e.tmp, "image.tar")
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := tar.NewWriter(f)
	if err := errors.Join(fill(w), w.Close(), f.Close()); err != nil {
		return err
	}
	return e.call(ctx, "import", file, image)
}

// start runs argv in a container of the image, and returns when it is up.
func (e *engine) start(ctx context.Context, name string, options, argv []string) error {
	args := append([]string{"run", "-d", "--name", name, "--cgroup-parent", e.rel}, options...)
	args = append(append(args, e.run...), image)
	return e.call(ctx, append(args, argv...)...)
}

func (e *engine) kill(ctx context.Context, name string) error { return e.call(ctx, "kill", name) }

func (e *engine) remove(ctx context.Context, name string) error {
	return e.call(ctx, "rm", "-f", name)
}

// close ends all that is left of the engine and removes it.
func (e *engine) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if e.root != nil && e.root.Process != nil {
		e.root.Process.Kill()                     // and with it everything in its namespaces
		cgroup.Kill(e.layout.V2(e.rel))           // what has none: conmon. Remove says what is wrong
		cgroup.WaitEmpty(ctx, e.layout.V2(e.rel)) // as above
		e.root.Wait()                             // killed on purpose
	}
	err := errors.Join(e.layout.Remove(ctx, e.rel), os.RemoveAll(e.tmp), os.RemoveAll(e.dir))
	if e.made {
		err = errors.Join(err, os.Remove(e.covered))
	}
	return err
}

// dockerWay is how a dockerd is set up.
type dockerWay struct {
	storage string // its driver for images and containers: vfs works everywhere
	bridge  bool   // a network namespace of its own, with a bridge and its rules; else it makes neither bridge nor rules
}

// openDocker starts Debian's dockerd by hand: everything of it in a pid namespace that dies with it.
func openDocker(ctx context.Context, at site, w dockerWay) (*engine, error) {
	if !installed("/usr/sbin/dockerd", "/usr/bin/docker", "/usr/bin/unshare") {
		return nil, errNoPeer
	}
	e, err := newEngine(at, "docker", "/etc/docker") // dockerd puts a key there
	if err != nil {
		return nil, err
	}
	socket := "unix://" + filepath.Join(e.tmp, "sock")
	e.command = []string{"/usr/bin/docker", "--host", socket}
	line := fmt.Sprintf("/usr/sbin/dockerd --data-root %s --exec-root %s/exec --pidfile %s/pid --host %s --userland-proxy=false --storage-driver %s --log-level warn",
		e.dir, e.tmp, e.tmp, socket, w.storage)
	spaces := []string{"--pid", "--fork", "--kill-child", "--mount-proc"}
	if w.bridge {
		spaces = append(spaces, "--net")
	} else {
		line += " --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false"
	}
	err = e.begin(line, spaces...)
	if err == nil {
		err = until(ctx, "dockerd serves", func() bool { return e.call(ctx, "version") == nil })
	}
	if err != nil {
		return nil, errors.Join(err, e.close(context.WithoutCancel(ctx)))
	}
	return e, nil
}

// openPodman has no daemon: its root process only holds the namespaces, which each command enters (some 2 ms).
func openPodman(ctx context.Context, at site) (*engine, error) {
	if !installed("/usr/bin/podman", "/usr/bin/unshare", "/usr/bin/nsenter") {
		return nil, errNoPeer
	}
	e, err := newEngine(at, "podman", "/var/lib/containers") // a cache, whatever --root says
	if err != nil {
		return nil, err
	}
	if err := e.begin("sleep infinity"); err != nil {
		return nil, errors.Join(err, e.close(context.WithoutCancel(ctx)))
	}
	runc, err := exec.LookPath("runc") // crun does not run on hybrid cgroups
	if err != nil {
		return nil, errors.Join(err, e.close(context.WithoutCancel(ctx)))
	}
	e.command = []string{"/usr/bin/nsenter", "--target", fmt.Sprint(e.root.Process.Pid), "--mount", "--net",
		"/usr/bin/podman", "--root", e.dir, "--runroot", e.tmp + "/run", "--tmpdir", e.tmp + "/tmp", "--storage-driver", "vfs",
		"--cgroup-manager", "cgroupfs", "--runtime", runc, "--events-backend", "none"}
	// Its defaults are above this process's own limits.
	e.run = []string{"--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--log-driver", "none"}
	err = until(ctx, "podman's mounts", func() bool { return mounted(e.root.Process.Pid, e.covered) })
	if err != nil {
		return nil, errors.Join(err, e.close(context.WithoutCancel(ctx)))
	}
	return e, nil
}

func installed(files ...string) bool {
	for _, f := range files {
		if _, err := os.Stat(f); err != nil {
			return false
		}
	}
	return true
}

// mounted says whether a process sees a mount at dir that this one does not.
func mounted(pid int, dir string) bool {
	var here, there unix.Stat_t
	return unix.Stat(dir, &here) == nil && unix.Stat(fmt.Sprintf("/proc/%d/root%s", pid, dir), &there) == nil && here.Dev != there.Dev
}
