package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"

	"tagout/internal/idmap"
)

func imageProbes() []probe {
	return []probe{{Check{
		Name: "idmapped-mounts", Option: "CONFIG_USER_NS", Since: "5.12",
		Cost: "files of imported images seem to be nobody's in kids, and those that only root may read cannot be read there",
		Fix:  "put /var/lib/tagout on ext4, xfs or btrfs, and boot a kernel from Linux 5.12 on",
	}, probeIDMap}, {Check{
		Name: "mmdebstrap", Cost: "no image can be built of Debian packages; images can be imported and pulled",
		Fix: "`apt-get install mmdebstrap debian-archive-keyring`",
	}, probeBuilder}}
}

// probeBuilder asks the program for its version: what of it a build needs, its kid tries.
func probeBuilder(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "mmdebstrap", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("asking mmdebstrap for its version: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// probeIDMap mounts a directory with shifted owners, where the instances' images are or would be.
func probeIDMap(ctx context.Context) (string, error) {
	for _, parent := range []string{"/var/lib/tagout", "/var/lib"} {
		dir, err := os.MkdirTemp(parent, ".doctor-")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("trying an idmapped mount: %w", err)
		}
		if err := errors.Join(idmap.Try(ctx, dir), os.RemoveAll(dir)); err != nil {
			return "", err
		}
		return "mounted a directory below " + parent + " with shifted owners", nil
	}
	return "", errors.New("there is no /var/lib")
}
