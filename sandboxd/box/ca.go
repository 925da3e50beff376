package box

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/inspectca"
	"tagout/internal/instance"
)

// makeCA makes the CA under whose name the proxy answers on inspected connections. Only kids trust it. One
// that can be read and lasts is kept; any other is replaced.
func makeCA(_ context.Context, j *job) error {
	certFile, keyFile, idFile := inspectca.Files(j.inst.CADir())
	credentials := os.Getenv("CREDENTIALS_DIRECTORY") // systemd.exec(5)
	uid, gid := j.inst.UID(instance.Proxy), j.inst.GroupID()
	if ca, err := inspectca.Load(j.inst.CADir(), credentials); err == nil && ca.Keep(caName(j.inst), time.Now()) == nil {
		return errors.Join(chown(keyFile, uid, gid), chown(idFile, uid, gid)) // the slot may be another one since
	}
	ca, err := inspectca.New(caName(j.inst), time.Now())
	if err != nil {
		return err
	}
	if _, err := os.Lstat(keyFile); errors.Is(err, fs.ErrNotExist) {
		j.undo = append(j.undo, func(context.Context) error {
			return errors.Join(removeFile(certFile), removeFile(keyFile), removeFile(idFile))
		})
	}
	if err := removeFile(filepath.Join(j.inst.CADir(), "ca.key")); err != nil { // earlier versions kept it in clear
		return err
	}
	return ca.Write(j.inst.CADir(), credentials, uid, gid)
}

// chown gives a file to a user; one that is not there is nobody's.
func chown(file string, uid, gid int) error {
	if err := os.Chown(file, uid, gid); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func caName(i instance.Instance) string { return "Tagout inspection CA of instance " + i.Name() }
