package audit

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

var kills = flag.Int("audit.kills", 15, "how often the writer of a log is killed")

// runAsWriter makes this test binary write a log, the path of which it holds, until it is killed.
const runAsWriter = "TAGOUT_TEST_WRITE_AUDIT_LOG"

func TestMain(m *testing.M) {
	if path := os.Getenv(runAsWriter); path != "" {
		if err := writeUntilKilled(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// writeUntilKilled writes records from several goroutines and says on standard output which of them were acknowledged.
// Pieces are short, so that kills hit the change of files too.
func writeUntilKilled(path string) error {
	l, err := OpenWith(path, "test", "x", Options{ShardBytes: 20_000})
	if err != nil {
		return err
	}
	life := strconv.Itoa(os.Getpid())
	for g := range 8 {
		go func() {
			for i := 0; ; i++ {
				name := fmt.Sprint(life, "-", g, "-", i)
				if i%3 > 0 { // beside those that nobody waits for
					l.Log(Record{Event: EventLookup, Detail: "unasked"})
				}
				if l.LogDurable(neverEnds{}, Record{Event: EventLookup, Detail: name}) == nil {
					os.Stdout.WriteString(name + "\n") // one write(2): whole or not at all
				}
			}
		}()
	}
	<-time.After(time.Minute) // it is killed long before
	return errors.New("nobody killed the writer")
}

// neverEnds is a context that does not, for a process that does not end by itself.
type neverEnds struct{}

func (neverEnds) Deadline() (time.Time, bool) { return time.Time{}, false }
func (neverEnds) Done() <-chan struct{}       { return nil }
func (neverEnds) Err() error                  { return nil }
func (neverEnds) Value(any) any               { return nil }

// TestNoAcknowledgedRecordIsLost kills a process that writes a log, at random moments, the opening of the log among them.
// After each the log's tree is whole, and in the end every record that was acknowledged is there once.
func TestNoAcknowledgedRecordIsLost(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	tl.size = 20_000
	if err := os.MkdirAll(tl.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	acked := map[string]int{}
	for n := range *kills {
		for _, name := range killedAtRandom(t, tl.path(), nil) {
			acked[name]++
		}
		l := tl.open()
		tl.end(l)
		if n%10 == 9 || n == *kills-1 {
			tl.whole(true)
		}
	}
	if len(acked) < *kills*10 {
		t.Fatalf("only %d records were acknowledged: the test shows nothing", len(acked))
	}
	have := map[string]int{}
	crashes := 0
	for _, line := range tl.lines() {
		r := parse(line)
		have[r.Detail]++
		if r.Event == EventGap && r.Fields[FieldCause] == "crash" {
			crashes++
		} else if r.Event == EventGap {
			t.Errorf("a gap that no kill makes: %s", line)
		}
	}
	for name := range acked {
		if have[name] != 1 {
			t.Errorf("record %s was acknowledged, and is there %d times", name, have[name])
		}
	}
	if crashes < *kills/2 {
		t.Errorf("%d kills, and only %d gap records that tell of one", *kills, crashes)
	}
	t.Logf("%d kills, %d records acknowledged, %d told", *kills, len(acked), crashes)
}

// killedAtRandom runs a writer for a moment and returns what it said was acknowledged. Where meanwhile is not nil it is
// done when the writer has begun.
func killedAtRandom(t *testing.T, path string, meanwhile func()) []string {
	t.Helper()
	cmd := exec.Command(os.Args[0]) // ourselves
	cmd.Env = append(os.Environ(), runAsWriter+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var names []string
	var wg sync.WaitGroup
	began := make(chan struct{})
	wg.Go(func() {
		var once sync.Once
		lines := bufio.NewReader(out)
		for {
			line, err := lines.ReadString('\n')
			if err == nil {
				names = append(names, strings.TrimSuffix(line, "\n"))
			}
			once.Do(func() { close(began) })
			if err != nil {
				return // the last line may be cut off: it was acknowledged, and is in the log, all the same
			}
		}
	})
	if meanwhile != nil {
		<-began
		meanwhile()
	} else if rand.IntN(5) > 0 { // else it may be killed while it opens the log
		<-began
	}
	time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond) // any moment
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	cmd.Wait() // it was killed
	return names
}

// mountedTmpfs is a filesystem of a size of its own, in megabytes.
func mountedTmpfs(t *testing.T, megabytes int) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", megabytes), "tagout-test", dir).CombinedOutput(); err != nil {
		t.Fatalf("mounting: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "-l", dir).CombinedOutput(); err != nil {
			t.Errorf("unmounting: %v: %s", err, out)
		}
	})
	return dir
}

// refuses waits until the log says that the disk takes nothing.
func refuses(t *testing.T, l *Logger) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); l.Err() == nil; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the log takes records although the disk takes none")
		}
		l.Log(Record{Event: EventLookup, Detail: strings.Repeat("x", 4096)})
	}
}

// fill writes a file until there is no room, and returns how to remove it.
func fill(t *testing.T, dir string) (remove func()) {
	t.Helper()
	path := filepath.Join(dir, "ballast")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(f, zeroes{}) // ends where there is no room
	f.Close()            // as above
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { return len(p), nil }
