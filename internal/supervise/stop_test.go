package supervise

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestStopEndsASupervisor(t *testing.T) {
	b := newBox(t, "tsup9", 9, nil)
	inst := b.cfg.Inst
	if err := Stop(context.Background(), inst); err != nil {
		t.Fatalf("with no supervisor: %v", err)
	}
	for _, how := range []string{"supervisor", "deaf supervisor"} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = []string{"TAGOUT_FAKE=" + how, "TAGOUT_FAKE_NAME=" + inst.Name()}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
		if _, err := out.Read(make([]byte, 7)); err != nil {
			t.Fatal(err)
		}
		if held, pid, err := holder(lockFile(inst)); !held || pid != cmd.Process.Pid || err != nil {
			t.Fatalf("holder = %v, %d, %v, want process %d", held, pid, err, cmd.Process.Pid)
		}
		err = stopWithin(context.Background(), inst, 300*time.Millisecond)
		if err != nil {
			t.Errorf("%s: %v", how, err)
		}
		cmd.Wait()
		if killed := strings.Contains(cmd.ProcessState.String(), "killed"); killed != (how == "deaf supervisor") {
			t.Errorf("%s ended with %s", how, cmd.ProcessState)
		}
	}
}

func TestStopRefusesItself(t *testing.T) {
	b := newBox(t, "tsupa", 9, nil)
	unlock, err := lock(b.cfg.Inst)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if err := Stop(context.Background(), b.cfg.Inst); err == nil || !strings.Contains(err.Error(), "this process itself") {
		t.Errorf("Stop = %v", err)
	}
}
