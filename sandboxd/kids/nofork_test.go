package kids

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// answer is what the sandboxd of another process says when it was asked for something.
type answer struct {
	Error    string
	Kind     Kind
	Recorded int      // refusals
	Left     []string // what the guards know
}

// runAsked is a sandboxd that does what its standard input says, in another process's place: that process may be given
// less than this one.
func runAsked() int {
	inst, err := instance.Open(os.Getenv("TAGOUT_TEST_ASKED"))
	var layout cgroup.Layout
	if err == nil {
		layout, err = cgroup.Detect()
	}
	g, rec := newGuards(), &records{}
	var m *Manager
	if err == nil {
		m, err = tryManager(inst, layout, os.Getenv("TAGOUT_TEST_INIT"), g, rec)
	}
	ctx := context.Background()
	if err == nil {
		err = m.Recover(ctx)
	}
	say := func(err error) {
		a := answer{Kind: KindOf(err), Recorded: rec.count(audit.EventKidRefused, audit.OutcomeFail), Left: g.left()}
		if err != nil {
			a.Error = err.Error()
		}
		json.NewEncoder(os.Stdout).Encode(a) // whoever asks sees that it is missing
	}
	say(err)
	more := wallVerbs(ctx, m)
	for in := bufio.NewScanner(os.Stdin); err == nil && in.Scan(); {
		verb, name, _ := strings.Cut(in.Text(), ": ")
		switch verb {
		case "spawn":
			_, err := m.Spawn(ctx, Request{Name: name, Purpose: "test", Plan: plan()})
			say(err)
		case "exec":
			r, err := runExec(ctx, m, name, wire.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo well"}})
			if err == nil && r.stdout.String() != "well\n" {
				err = fmt.Errorf("%q %q %+v", r.stdout.String(), r.stderr.String(), r.exit)
			}
			say(err)
		case "destroy":
			say(m.Destroy(ctx, name, "test", "asked to"))
		case "kill all":
			_, err := m.KillAll(ctx, "asked to")
			say(err)
		default:
			say(more[verb](name))
		}
	}
	return 0
}

// crowded is a box whose sandboxd is another process, in a cgroup of its own with a limit on processes.
type crowded struct {
	*box
	rel   string
	limit string // pids.max of it
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *json.Decoder
}

func newCrowded(t *testing.T) *crowded {
	t.Helper()
	b := newBox(t, "tsbfork")
	c := &crowded{box: b, rel: filepath.Join(b.inst.CgroupRel(), "crowded")}
	if err := b.layout.Create(c.rel); err != nil {
		t.Fatal(err)
	}
	dir := b.layout.V2(c.rel)
	if v1 := b.layout.V1("pids", c.rel); v1 != "" {
		dir = v1
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c.limit = filepath.Join(dir, "pids.max")
	c.start()
	t.Cleanup(c.end)
	return c
}

// start starts the sandboxd, with as many processes as it likes.
func (c *crowded) start() {
	c.t.Helper()
	c.allow(-1)
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	c.cmd = exec.Command("/bin/sh", "-c", `for dir; do echo $$ >"$dir/cgroup.procs" || exit; done; exec "$0"`, self, filepath.Dir(c.limit), c.layout.V2(c.rel))
	c.cmd.Env = append(os.Environ(), "TAGOUT_TEST_ASKED="+c.inst.Name(), "TAGOUT_TEST_INIT="+initPath)
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		c.in, err = c.cmd.StdinPipe()
	}
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.out = json.NewDecoder(out)
	if a, ok := c.answer(); !ok || a.Error != "" {
		c.t.Fatalf("starting: %v %+v", ok, a)
	}
}

func (c *crowded) end() {
	c.cmd.Process.Kill()
	c.cmd.Wait() // killed on purpose
}

// allow lets it have so many more processes and threads than it has; -1: as many as it likes.
func (c *crowded) allow(more int) {
	c.t.Helper()
	value := "max"
	if more >= 0 {
		raw, err := os.ReadFile(filepath.Join(filepath.Dir(c.limit), "pids.current"))
		if err != nil {
			c.t.Fatal(err)
		}
		var has int
		if _, err := fmt.Sscan(string(raw), &has); err != nil {
			c.t.Fatal(err)
		}
		value = fmt.Sprint(has + more)
	}
	if err := os.WriteFile(c.limit, []byte(value), 0); err != nil {
		c.t.Fatal(err)
	}
}

// ask asks for something; false: it has died over it.
func (c *crowded) ask(what string) (answer, bool) {
	if _, err := fmt.Fprintln(c.in, what); err != nil {
		return answer{}, false
	}
	return c.answer()
}

func (c *crowded) answer() (a answer, ok bool) {
	return a, c.out.Decode(&a) == nil
}

// want asks for what has to succeed.
func (c *crowded) want(what string) {
	c.t.Helper()
	if a, ok := c.ask(what); !ok || a.Error != "" {
		c.t.Fatalf("%s: %v %+v", what, ok, a)
	}
}

// wantNobody wants all kids' processes to be dead.
func (c *crowded) wantNobody() {
	c.t.Helper()
	if some, err := cgroup.Populated(c.layout.V2(c.inst.KidsCgroupRel())); err != nil || some {
		c.t.Fatalf("a kid lives: %v %v", some, err)
	}
}

// TestNoMoreProcesses: sandboxd is given room for one process or thread more each time, until a spawn succeeds. Before
// that there is no kid, nothing of it is left, and the answer says why; the kid beside it feels nothing, and a destroy and
// a stop of all need no room.
func TestNoMoreProcesses(t *testing.T) {
	c := newCrowded(t)
	c.want("spawn: beside")
	refusals, deaths, before, n := 0, 0, 0, 0 // before: refusals of predecessors
	for ; ; n++ {
		c.allow(n)
		a, ok := c.ask("spawn: k1")
		if !ok { // Go gives up where it gets no thread: a successor takes all that it left
			deaths++
			before = refusals
			c.end()
			c.start()
			c.want("exec: beside")
		} else if a.Error == "" {
			break
		} else {
			refusals++
			t.Logf("%d: %s", n, a.Error)
			if a.Kind != Capacity {
				t.Errorf("%d: kind %v: %s", n, a.Kind, a.Error)
			}
			if a.Recorded != refusals-before {
				t.Errorf("%d: %d refusals are recorded, want %d", n, a.Recorded, refusals-before)
			}
			for _, l := range a.Left {
				if !strings.Contains(l, "beside") && !strings.Contains(l, "mark") {
					t.Errorf("%d: %s", n, l)
				}
			}
		}
		left := slices.DeleteFunc(c.leftovers(), func(l string) bool { return !strings.Contains(l, "k1") })
		if len(left) > 0 {
			t.Fatalf("%d: left behind:\n%s", n, strings.Join(left, "\n"))
		}
		if n > 200 {
			t.Fatal("no room seems to be enough")
		}
	}
	t.Logf("room for %d is enough; %d refusals, %d deaths", n, refusals, deaths)
	if refusals == 0 {
		t.Error("nothing was refused: the test shows nothing")
	}
	c.allow(-1)
	c.want("exec: beside")
	c.allow(0)
	c.want("destroy: k1")
	c.want("kill all")
	c.wantNobody()
	c.want("destroy: beside")
	c.allow(-1)
	c.want("spawn: k1")
	c.want("exec: k1")
	c.want("destroy: k1")
	c.end()
	c.wantNothingLeft()
}
