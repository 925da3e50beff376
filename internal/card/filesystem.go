package card

import (
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"tagout/internal/yamlx"
)

// Defaults and bounds of the writable places. They are held in memory.
const (
	defaultWorkspace = 64 * mib
	defaultTmp       = 16 * mib
	defaultRoot      = 512 * mib
	minDisk          = 1 * mib
	maxDisk          = 64 * gib

	workspaceDir  = "/workspace/"
	maxPath       = 1024
	defaultMode   = 0o644
	maxInputFiles = 256
)

func readFilesystem(v yamlx.Value, image string) Filesystem {
	m, _ := v.Map(filesystemKeys...)
	noExec, _ := m.Get("noexec").Bool()
	return Filesystem{
		Inputs:    readInputs(m.Get("inputs")),
		Workspace: readSize(m.Get("workspace"), defaultWorkspace, minDisk, maxDisk),
		Tmp:       readSize(m.Get("tmp"), defaultTmp, minDisk, maxDisk),
		Root:      readRoot(m.Get("root"), image),
		NoExec:    noExec,
	}
}

// readRoot reads the size of the layer that only one image has.
func readRoot(v yamlx.Value, image string) int64 {
	if image == HostWritable {
		return readSize(v, defaultRoot, minDisk, maxDisk)
	}
	if v.Present() {
		v.Refuse("remove it, or write `image: host+writable`", "with the image %s nothing outside of /workspace and /tmp is writable", yamlx.Quote(image))
	}
	return 0
}

func readInputs(v yamlx.Value) []Input {
	var out []Input
	entries := v.List()
	if len(entries) > maxInputFiles {
		v.Refuse("pack them into one archive", "there are more than %d inputs", maxInputFiles)
		return nil
	}
	for _, entry := range entries {
		m, ok := entry.Map(inputKeys...)
		if !ok {
			continue
		}
		in := Input{From: readFrom(m.Need("from")), To: readTo(m.Need("to")), Mode: readMode(m.Get("mode"))}
		for _, other := range out {
			switch {
			case in.To == "" || other.To == "":
			case in.To == other.To:
				m.Get("to").Refuse("write another target", "%s is the target of another input already", in.To)
			case strings.HasPrefix(in.To, other.To+"/") || strings.HasPrefix(other.To, in.To+"/"):
				m.Get("to").Refuse("write another target", "%s and %s cannot both be files", in.To, other.To)
			}
		}
		out = append(out, in)
	}
	return out
}

// readFrom reads a path that stays below the directory in which it is resolved. Symbolic links are the
// copier's business: it must not follow one out.
func readFrom(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	const fix = "write a relative path below the card's input directory, such as `run.sh`"
	switch {
	case s == "" || len(s) > maxPath || hasControl(s):
		v.Refuse(fix, "%s is not a path", yamlx.Quote(s))
	case path.IsAbs(s):
		v.Refuse(fix, "%s is absolute", yamlx.Quote(s))
	case strings.Contains("/"+s+"/", "/../"):
		v.Refuse(fix, "%s contains ..", yamlx.Quote(s))
	case !filepath.IsLocal(s) || path.Clean(s) == ".":
		v.Refuse(fix, "%s is not a file below it", yamlx.Quote(s))
	case path.Clean(s) != s:
		v.Refuse("write `"+path.Clean(s)+"` instead", "%s is not written plainly", yamlx.Quote(s))
	}
	return s
}

func readTo(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	const fix = "write an absolute path below /workspace, such as `/workspace/run.sh`"
	switch clean := path.Clean(s); {
	case s == "" || len(s) > maxPath || hasControl(s):
		v.Refuse(fix, "%s is not a path", yamlx.Quote(s))
	case !strings.HasPrefix(clean, workspaceDir):
		v.Refuse(fix, "%s is not below /workspace", yamlx.Quote(s))
	case clean != s:
		v.Refuse("write `"+clean+"` instead", "%s is not written plainly", yamlx.Quote(s))
	default:
		return s
	}
	return ""
}

func hasControl(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }) >= 0
}

var modeRE = regexp.MustCompile(`^0?[0-7]{3}$`)

// readMode reads permission bits in octal. They are a text, because YAML does not agree on octal numbers.
func readMode(v yamlx.Value) fs.FileMode {
	s, ok := v.Text()
	if !ok {
		return defaultMode
	}
	if !modeRE.MatchString(s) {
		v.Refuse("write permission bits in quotes, such as `\"0755\"`", "%s is not a file mode", yamlx.Quote(s))
		return defaultMode
	}
	n, _ := strconv.ParseUint(s, 8, 32) // the pattern leaves nothing to fail
	return fs.FileMode(n)
}
