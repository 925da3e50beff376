package network

import (
	"syscall"

	"golang.org/x/sys/unix"
)

type unixIDMap = syscall.SysProcIDMap

// newNamespaces makes a child start in a new user namespace and in a network namespace that it owns, which goes with it
// where nobody pins it.
// setgroups(2) stays allowed: runc drops the supplementary groups with it.
func newNamespaces(ids []unixIDMap) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings:                ids,
		GidMappings:                ids,
		GidMappingsEnableSetgroups: true,
	}
}
