package runtime

import "github.com/opencontainers/runtime-spec/specs-go"

// installCaps are what package managers need, over the kid's own user namespace and nothing else: to write, own and mode the
// files that they install, and to run scripts as other users (capabilities(7)). None mounts, makes devices, changes the
// network, looks into other processes or signals those of other users.
var installCaps = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETUID", "CAP_SETGID"}

// asRoot makes the process the root of the kid's user namespace.
func asRoot(p *specs.Process) {
	p.User.UID, p.User.GID = 0, 0
	p.Capabilities = &specs.LinuxCapabilities{Bounding: installCaps, Effective: installCaps, Permitted: installCaps}
}
