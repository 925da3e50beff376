package audit

import (
	"fmt"
	"os"
)

// OpenLate is Open for the daemon that must start even when its log cannot be opened (killswitchd): the file
// is opened at the first write and tried again until it opens; records wait in the queue meanwhile.
func OpenLate(path, instance, daemon string) *Logger {
	return newLogger(&lateFile{path: path}, 0, instance, daemon)
}

// lateFile opens its file when it is first written to. Only the logger's writer goroutine uses it.
type lateFile struct {
	path string
	f    *os.File
	base int64 // length of the file when it was opened; the logger counts from 0
}

func (lf *lateFile) Write(p []byte) (int, error) {
	if lf.f == nil {
		f, err := os.OpenFile(lf.path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o640)
		if err != nil {
			return 0, fmt.Errorf("opening the audit log: %w", err)
		}
		_, size, err := closeTornLine(f)
		if err != nil {
			f.Close() // already failing
			return 0, fmt.Errorf("opening the audit log %s: %w", lf.path, err)
		}
		lf.f, lf.base = f, size
	}
	return lf.f.Write(p)
}

func (lf *lateFile) Truncate(size int64) error {
	if lf.f == nil {
		return nil
	}
	return lf.f.Truncate(lf.base + size)
}

func (lf *lateFile) Sync() error {
	if lf.f == nil {
		return fmt.Errorf("syncing the audit log %s: it could not be opened yet", lf.path)
	}
	return lf.f.Sync()
}

func (lf *lateFile) Close() error {
	if lf.f == nil {
		return nil
	}
	return lf.f.Close()
}
