package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
)

// ErrNotInstalled means that there are no pinned maps.
var ErrNotInstalled = errors.New("the BPF programs are not installed: run `tagout setup`")

// Maps are the open maps of one instance. Safe for concurrent use. They stay usable when the BPF filesystem is
// unmounted or emptied. Close them.
type Maps struct {
	pinDir string
	maps   map[string]*ebpf.Map
	denied map[string]error // maps that this process may not open
	reader reader           // of denials
	execs  reader           // of started programs
}

// Open opens the maps pinned in pinDir, each for reading and writing, or for reading alone where the file's
// mode allows no more. A map that may not even be read fails only when it is used; who may read none is refused
// at once. It fails with
// ErrNotInstalled where a map is missing and with ErrLayout where they are of another version.
func Open(pinDir string) (*Maps, error) {
	m, err := open(pinDir)
	if err != nil {
		return nil, fmt.Errorf("opening BPF maps in %s: %w", pinDir, err)
	}
	return m, nil
}

func open(pinDir string) (*Maps, error) {
	spec, err := loadTagout()
	if err != nil {
		return nil, err
	}
	m := &Maps{pinDir: pinDir, maps: map[string]*ebpf.Map{}, denied: map[string]error{}}
	for name := range spec.Maps {
		if !isOurMap(name) {
			continue
		}
		opened, err := openMap(filepath.Join(pinDir, name))
		switch {
		case errors.Is(err, fs.ErrPermission):
			m.denied[name] = err
			continue
		case errors.Is(err, fs.ErrNotExist):
			err = ErrNotInstalled
		case err == nil:
			m.maps[name] = opened
			if spec.Maps[name].Compatible(opened) != nil {
				err = ErrLayout
			} else if name == tagoutMapLayout {
				err = checkVersion(opened)
			}
		}
		if err != nil {
			closeMaps(m.maps)
			return nil, fmt.Errorf("map %s: %w", name, err)
		}
	}
	if err := m.denied[tagoutMapLayout]; err != nil {
		closeMaps(m.maps) // the whole group may read it: this process has no business here
		return nil, err
	}
	return m, nil
}

func openMap(path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrPermission) {
		return ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	}
	return m, err
}

// Close closes the maps; what they hold stays.
func (m *Maps) Close() error {
	closeMaps(m.maps)
	return nil
}

func (m *Maps) table(name string) (*ebpf.Map, error) {
	if t := m.maps[name]; t != nil {
		return t, nil
	}
	return nil, fmt.Errorf("opening BPF map %s: %w", name, m.denied[name])
}

func (m *Maps) put(name string, key, value any) error {
	t, err := m.table(name)
	if err != nil {
		return err
	}
	if err := t.Put(key, value); err != nil {
		return fmt.Errorf("writing BPF map %s: %w", name, err)
	}
	return nil
}

// remove deletes a key; a key that is not there is not an error.
func (m *Maps) remove(name string, key any) error {
	t, err := m.table(name)
	if err != nil {
		return err
	}
	if err := t.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("deleting from BPF map %s: %w", name, err)
	}
	return nil
}

// get says whether the key is there.
func (m *Maps) get(name string, key, value any) (bool, error) {
	t, err := m.table(name)
	if err != nil {
		return false, err
	}
	err = t.Lookup(key, value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading BPF map %s: %w", name, err)
	}
	return true, nil
}

// PutKid makes the cgroup and the host-side link stand for the session with this mark. An ifindex or a cgroup
// id of 0 is left out, for kids that have only the other.
func (m *Maps) PutKid(cgroupID uint64, ifindex int, mark uint32) error {
	if mark == 0 || ifindex < 0 {
		return fmt.Errorf("adding a kid: mark %d or link %d is not usable", mark, ifindex)
	}
	if cgroupID != 0 {
		if err := m.put(tagoutMapKidCgroups, cgroupID, mark); err != nil {
			return err
		}
	}
	if ifindex != 0 {
		return m.put(tagoutMapKidLinks, uint32(ifindex), mark) // checked above
	}
	return nil
}

// DeleteKid forgets the cgroup and the link: whatever still comes from there is denied as unknown. Programs on
// the link stay until the link goes. Forgetting twice is not an error.
func (m *Maps) DeleteKid(cgroupID uint64, ifindex int) error {
	return errors.Join(m.remove(tagoutMapKidCgroups, cgroupID), m.remove(tagoutMapKidLinks, uint32(ifindex))) // an ifindex
}

// AllowPort lets the session open connections to a port of the virtual net. Only TCP (6) has an effect.
func (m *Maps) AllowPort(mark uint32, proto uint8, port uint16) error {
	return m.put(tagoutMapPorts, &tagoutPortKey{Mark: mark, Proto: proto, Port: port}, uint8(1))
}

// ForgetPorts takes every port of the session away.
func (m *Maps) ForgetPorts(mark uint32) error {
	return m.keepPorts(mark, func(proto uint8, port uint16) bool { return false })
}

// SetPorts makes ports the session's allowed ports of the protocol. New ones open before old ones close, and
// ports that stay are never touched.
func (m *Maps) SetPorts(mark uint32, proto uint8, ports []uint16) error {
	for _, port := range ports {
		if err := m.AllowPort(mark, proto, port); err != nil {
			return err
		}
	}
	return m.keepPorts(mark, func(p uint8, port uint16) bool { return p != proto || slices.Contains(ports, port) })
}

// keepPorts takes away the session's ports that keep does not want.
func (m *Maps) keepPorts(mark uint32, keep func(proto uint8, port uint16) bool) error {
	t, err := m.table(tagoutMapPorts)
	if err != nil {
		return err
	}
	var keys []tagoutPortKey
	var key tagoutPortKey
	var one uint8
	it := t.Iterate()
	for it.Next(&key, &one) {
		if key.Mark == mark && !keep(key.Proto, key.Port) {
			keys = append(keys, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("reading BPF map %s: %w", tagoutMapPorts, err)
	}
	for i := range keys {
		if err := m.remove(tagoutMapPorts, &keys[i]); err != nil {
			return err
		}
	}
	return nil
}

// AttachLink puts the programs on both directions of a kid's host-side link, in place of older ones of ours.
// The link must be in the caller's network namespace. Until PutKid names the link, they drop everything.
func (m *Maps) AttachLink(ifindex int) error {
	var progs []*ebpf.Program
	defer func() { closePrograms(progs) }()
	for _, h := range linkHooks {
		p, err := ebpf.LoadPinnedProgram(filepath.Join(m.pinDir, progPin+h.program), nil)
		if err != nil {
			return fmt.Errorf("opening pinned program %s: %w", h.program, err)
		}
		progs = append(progs, p)
	}
	return attachLink(ifindex, progs[0], progs[1])
}
