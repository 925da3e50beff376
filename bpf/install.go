package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// layoutVersion is TAGOUT_LAYOUT of maps.h; a test compares the two.
const layoutVersion = 8

// ErrLayout means that maps of another version are installed, whose contents this version cannot read.
var ErrLayout = errors.New("the installed BPF maps are of another Tagout version: destroy the kids, run `tagout cleanup`, then `tagout setup`")

// Install loads the programs, attaches them and pins them with their maps. It needs root and a BPF filesystem
// mounted above cfg.PinDir, and mounts nothing itself.
//
// It may be run again at any time, also with other constants or newer programs: every program is exchanged in
// one step with its predecessor (or runs beside it for a moment, when both must agree), and maps in use are
// kept with their contents, found by their pins or, when those are gone, through the attached programs. If the
// layouts differ it changes nothing and fails with ErrLayout. When it fails half-way, what is attached stays.
//
// systemd mounts /sys/fs/bpf for root alone; Install lets others pass through (not list) the directories above
// PinDir, because the daemons are not root.
func Install(cfg Config) error {
	if err := install(cfg, cfg.constants()); err != nil {
		return fmt.Errorf("installing BPF programs: %w", err)
	}
	return nil
}

func install(cfg Config, consts constants) error {
	if err := cfg.check(); err != nil {
		return err
	}
	old := findMaps(cfg.PinDir, append([]string{cfg.KidsCgroup}, cfg.DaemonCgroups...))
	defer closeMaps(old)
	coll, err := load(consts, old)
	if err != nil {
		return err
	}
	defer coll.Close()
	if err := seed(coll, consts); err != nil {
		return err
	}
	if err := pinAll(coll, cfg); err != nil {
		return err
	}
	if err := attachAll(coll, cfg); err != nil {
		return err
	}
	if err := attachExec(coll, cfg.PinDir); err != nil {
		return err
	}
	return reattachLinks(coll)
}

// load verifies and loads the programs, with the maps in old instead of new ones.
func load(consts constants, old map[string]*ebpf.Map) (*ebpf.Collection, error) {
	spec, err := loadTagout()
	if err != nil {
		return nil, fmt.Errorf("reading the built-in BPF object: %w", err)
	}
	if err := checkLayout(spec, old); err != nil {
		return nil, err
	}
	if err := consts.set(spec); err != nil {
		return nil, err
	}
	tcx, err := haveTCX()
	if err != nil {
		return nil, err
	}
	if !tcx {
		plainLinkPrograms(spec)
	}
	if haveKernelTypes() != nil {
		delete(spec.Programs, tagoutProgTagoutExec) // kids' programs go unrecorded, which sandboxd records
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: old})
	if err != nil {
		return nil, fmt.Errorf("loading (run `tagout doctor` to see what the kernel lacks): %w", err)
	}
	if err := bindMaps(coll); err != nil {
		coll.Close()
		return nil, err
	}
	return coll, nil
}

// bindMaps ties every map to a program that is always attached to the kids, so that findMaps gets all of them
// back when the pins are gone.
func bindMaps(coll *ebpf.Collection) error {
	for name, m := range coll.Maps {
		if !isOurMap(name) {
			continue
		}
		if err := coll.Programs[tagoutProgTagoutSocket].BindMap(m); err != nil {
			return fmt.Errorf("binding map %s (needs Linux 5.10): %w", name, err)
		}
	}
	return nil
}

func checkLayout(spec *ebpf.CollectionSpec, old map[string]*ebpf.Map) error {
	for name, m := range old {
		if err := spec.Maps[name].Compatible(m); err != nil {
			return fmt.Errorf("map %s: %w (%w)", name, ErrLayout, err)
		}
	}
	if m := old[tagoutMapLayout]; m != nil {
		return checkVersion(m)
	}
	return nil
}

// checkVersion accepts version 0 too: a map that an interrupted Install never came to seed, so never used.
func checkVersion(m *ebpf.Map) error {
	var info tagoutLayoutInfo
	if err := m.Lookup(uint32(0), &info); err != nil {
		return fmt.Errorf("reading the layout version: %w", err)
	}
	if info.Version != layoutVersion && info.Version != 0 {
		return fmt.Errorf("layout %d, this build has %d: %w", info.Version, layoutVersion, ErrLayout)
	}
	return nil
}

// seed writes what the programs expect to find from the start.
func seed(coll *ebpf.Collection, consts constants) error {
	info := tagoutLayoutInfo{Version: layoutVersion}
	if err := coll.Maps[tagoutMapLayout].Put(uint32(0), &info); err != nil {
		return fmt.Errorf("writing the layout version: %w", err)
	}
	for _, mark := range []uint32{0, consts.boxMark} {
		if err := makeCounters(coll.Maps[tagoutMapCounters], mark); err != nil {
			return err
		}
	}
	return nil
}

func makeCounters(m *ebpf.Map, mark uint32) error {
	var zero tagoutTally
	if err := m.Update(mark, &zero, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("making counters for mark %#x: %w", mark, err)
	}
	return nil
}

// pin is one file in PinDir.
type pin struct {
	name     string
	obj      interface{ Pin(string) error }
	uid, gid int
	mode     fs.FileMode
}

// progPin begins the names of pinned programs.
const progPin = "prog_"

func pins(coll *ebpf.Collection, cfg Config) []pin {
	var out []pin
	for name, m := range coll.Maps {
		if !isOurMap(name) {
			continue // constants: they live and die with their program
		}
		p := pin{name: name, obj: m, gid: cfg.GID, mode: 0o640}
		switch name {
		case tagoutMapSessions, tagoutMapStopped, tagoutMapStopAll, tagoutMapLeases, tagoutMapRevoked:
			p.uid = cfg.KillUID
		case tagoutMapEvents, tagoutMapExecs, tagoutMapExecScratch:
			p.gid, p.mode = 0, 0o600
		}
		out = append(out, p)
	}
	for name, prog := range coll.Programs {
		out = append(out, pin{name: progPin + name, obj: prog, mode: 0o600})
	}
	return out
}

func isOurMap(name string) bool { return !strings.Contains(name, ".") }

func pinAll(coll *ebpf.Collection, cfg Config) error {
	if err := makePinDir(cfg.PinDir, cfg.GID); err != nil {
		return err
	}
	for _, p := range pins(coll, cfg) {
		if err := p.write(cfg.PinDir); err != nil {
			return fmt.Errorf("pinning %s: %w", p.name, err)
		}
	}
	return nil
}

// write pins under another name, sets owner and mode, and only then gives the file its name.
func (p pin) write(dir string) error {
	final := filepath.Join(dir, p.name)
	tmp := final + "_new" // the BPF filesystem allows no dots
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := p.obj.Pin(tmp); err != nil {
		return err
	}
	if err := errors.Join(os.Chmod(tmp, p.mode), os.Chown(tmp, p.uid, p.gid)); err != nil {
		return err
	}
	return os.Rename(tmp, final)
}

func makePinDir(dir string, gid int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // narrowed below
		return fmt.Errorf("making %s: %w", dir, err)
	}
	if !onBPFFS(dir) {
		return fmt.Errorf("%s is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`", dir)
	}
	for up := filepath.Dir(dir); onBPFFS(up); up = filepath.Dir(up) {
		info, err := os.Stat(up)
		if err != nil {
			return fmt.Errorf("reading the mode of %s: %w", up, err)
		}
		if err := os.Chmod(up, info.Mode()|0o111); err != nil {
			return fmt.Errorf("letting the daemons pass %s: %w", up, err)
		}
	}
	if err := errors.Join(os.Chmod(dir, 0o750), os.Chown(dir, 0, gid)); err != nil { // the group reads
		return fmt.Errorf("giving %s to group %d: %w", dir, gid, err)
	}
	return nil
}

func onBPFFS(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

func closeMaps(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		m.Close() // only a descriptor
	}
}
