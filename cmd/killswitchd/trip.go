package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"tagout/bpf"
	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
	"tagout/killswitch"
)

// trips wires the trip rules.
func trips(d *daemon.Daemon, layout cgroup.Layout, net *network, sw *killswitch.Switch) *killswitch.Trips {
	pids := layout.V1("pids", d.Inst.KidsCgroupRel())
	if pids == "" {
		pids = layout.V2(d.Inst.KidsCgroupRel())
	}
	return sw.Trips(killswitch.TripConfig{
		Sources: &sources{
			net: net, pids: pids, docs: d.Inst.SessionDir(),
			rules: jsonFile[[]trip.Rule]{path: filepath.Join(d.Inst.StateDir(), instance.TripFile)},
			watch: jsonFile[wire.Watched]{path: d.Inst.WatchFile()},
		},
		Logs: d.Inst.AuditDir(), Keep: filepath.Join(d.Inst.TripDir(), "counted.json"),
	})
}

// sources reads what trip rules measure. Only the rules' own goroutine uses it.
type sources struct {
	net   *network
	pids  string // the directory above the kids' cgroups that has the pids controller
	docs  string
	rules jsonFile[[]trip.Rule]
	watch jsonFile[wire.Watched]
}

func (s *sources) counters(mark uint32) (bpf.Counters, error) {
	m, err := s.net.maps()
	if err != nil {
		return bpf.Counters{}, err
	}
	return m.Counters(mark)
}

func (s *sources) Denied(mark uint32) (int64, error) {
	c, err := s.counters(mark)
	n := int64(0)
	for code, all := range c.Denied {
		n += int64(all - min(all, c.Quiet[code]))
	}
	return n, err
}

func (s *sources) BytesOut(mark uint32) (int64, error) {
	c, err := s.counters(mark)
	return int64(c.Upstream.PassedUp.Bytes), err
}

func (s *sources) CPUTime(d *session.Session) (time.Duration, error) { return cgroup.CPUTime(d.Cgroup) }

func (s *sources) Processes(d *session.Session) (int64, error) {
	return cgroup.Tasks(filepath.Join(s.pids, d.Kid), d.Cgroup)
}

// watchStale is how old sandboxd's word that it watches may be.
const watchStale = 3 * time.Second

func (s *sources) Watched(d *session.Session) error {
	w, err := s.watch.read()
	switch {
	case err != nil:
		return fmt.Errorf("nobody says that the kid's programs and files are watched: is sandboxd running? %w", err)
	case bootclock.Now()-w.At > watchStale:
		return fmt.Errorf("sandboxd last said %v ago that it watches programs and files", (bootclock.Now() - w.At).Round(time.Second))
	}
	if !slices.Contains(w.Sessions, d.ID) {
		return errors.New("sandboxd does not watch the kid's programs and files")
	}
	return nil
}

func (s *sources) Rules() ([]trip.Rule, error) { return s.rules.read() }

func (s *sources) Stamp() (time.Time, error) {
	info, err := os.Stat(s.docs)
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// jsonFile is a file that is replaced now and then.
type jsonFile[T any] struct {
	path  string
	seen  os.FileInfo // of what value was read from
	value T
}

// read returns what the file holds; it reads it only where it was replaced since.
func (f *jsonFile[T]) read() (T, error) {
	var none T
	info, err := os.Stat(f.path)
	if err != nil {
		return none, err
	}
	if f.seen != nil && os.SameFile(f.seen, info) && f.seen.ModTime().Equal(info.ModTime()) && f.seen.Size() == info.Size() {
		return f.value, nil
	}
	raw, err := os.ReadFile(f.path)
	if err != nil {
		return none, err
	}
	var value T
	if err := json.Unmarshal(raw, &value); err != nil {
		return none, fmt.Errorf("reading %s: %w", f.path, err)
	}
	f.seen, f.value = info, value
	return value, nil
}
