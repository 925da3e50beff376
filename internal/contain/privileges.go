package contain

import (
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

func privileges() []attempt {
	const class = "privileged capabilities"
	before := os.Getuid() == 0
	return []attempt{
		{class, "become root", func(Target) error { return rooted(before, unix.Setresuid(0, 0, 0)) }},
		{class, "raise a capability", func(Target) error { return raise() }},
		{class, "give a file to root", func(t Target) error {
			path := filepath.Join(t.Dir, "given")
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				return nil // a place that cannot be tried counts against us
			}
			defer os.Remove(path) // our own
			return rooted(before, os.Chown(path, 0, 0))
		}},
		{class, "name the machine", func(Target) error {
			name, err := os.Hostname()
			if err != nil {
				return err
			}
			return unix.Sethostname([]byte(name))
		}},
		{class, "change the root directory", func(Target) error { return unix.Chroot("/") }},
	}
}

// rooted judges what came of asking for root's rights. For whoever was root before, in a user namespace of its own
// (user_namespaces(7)), being given them is no news: it reaches something where its root is the machine's.
func rooted(before bool, err error) error {
	if err != nil || !before {
		return err
	}
	raw, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	var inside, outside uint32
	if _, err := fmt.Sscan(string(raw), &inside, &outside); err != nil {
		return err
	}
	if inside != outside {
		return fmt.Errorf("root here is user %d outside", outside)
	}
	return nil
}

// raise asks for CAP_SYS_ADMIN in all sets.
func raise() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	const admin = 1 << unix.CAP_SYS_ADMIN
	data[0].Permitted |= admin
	data[0].Effective |= admin
	return unix.Capset(&header, &data[0])
}

func keyrings() []attempt {
	const class = "keyrings"
	process := ^uintptr(1) // KEY_SPEC_PROCESS_KEYRING, -2: it goes with the process
	kind, name, payload := append([]byte("user"), 0), append([]byte("tagout-contain"), 0), []byte("x")
	return []attempt{
		{class, "add a key", func(Target) error {
			_, _, errno := unix.Syscall6(unix.SYS_ADD_KEY, uintptr(unsafe.Pointer(&kind[0])), uintptr(unsafe.Pointer(&name[0])),
				uintptr(unsafe.Pointer(&payload[0])), uintptr(len(payload)), process, 0)
			if errno != 0 {
				return errno
			}
			return nil
		}},
		{class, "ask for a key", func(Target) error {
			return call(unix.SYS_REQUEST_KEY, [4]uintptr{uintptr(unsafe.Pointer(&kind[0])), uintptr(unsafe.Pointer(&name[0])), 0, 0}, unix.ENOKEY)
		}},
		{class, "look at the session keyring", func(Target) error {
			return call(unix.SYS_KEYCTL, [4]uintptr{unix.KEYCTL_GET_KEYRING_ID, ^uintptr(2), 0, 0}) // KEY_SPEC_SESSION_KEYRING, -3
		}},
		{class, "list keys", func(Target) error { return tells("/proc/keys") }},
	}
}

// tells returns nil where the file has anything in it.
func tells(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	var b [1]byte
	_, err = f.Read(b[:]) // io.EOF: it is empty
	return err
}
