package vaultseal

import (
	"bytes"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tpm starts a software TPM with a state of its own, where systemd-creds then looks for one, and returns how to end it.
func tpm(t *testing.T, state string) (stop func()) {
	t.Helper()
	port := freePair(t)
	at := func(port int) string { return fmt.Sprintf("type=tcp,bindaddr=127.0.0.1,port=%d", port) }
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--tpmstate", "dir="+state, "--server", at(port), "--ctrl", at(port+1), "--flags", "not-need-init,startup-clear")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal("a software TPM is needed here (Debian packages swtpm and libtss2-tcti-swtpm0):", err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }() // it ends when it is killed, or after its one client
	stop = func() { cmd.Process.Kill(); <-ended }
	t.Cleanup(stop)
	deadline := time.Now().Add(10 * time.Second)
	for {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port+1)) // the other one takes a single client
		if err == nil {
			c.Close() // only looked whether it is there
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the software TPM does not come up: %v\n%s", err, out.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Setenv("SYSTEMD_TPM2_DEVICE", fmt.Sprintf("swtpm:host=127.0.0.1,port=%d", port))
	return stop
}

// freePair returns a port that is free as its successor is: the two that a TPM's driver expects.
func freePair(t *testing.T) int {
	t.Helper()
	for range 100 {
		a, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := a.Addr().(*net.TCPAddr).Port
		b, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+1))
		a.Close() // only to see that it is free
		if err == nil {
			b.Close() // as above
			return port
		}
	}
	t.Fatal("no two free ports beside each other")
	return 0
}

// TestATPMKeepsTheKey: a software TPM with systemd's own code for TPMs. The credential opens with that TPM alone: not
// without one, and not with another, though the disk is the same.
func TestATPMKeepsTheKey(t *testing.T) {
	hostKey(t)
	state := t.TempDir()
	c := Credential{Name: "tagout-credd", File: filepath.Join(t.TempDir(), "tagout-test")}
	stop := tpm(t, state)
	var recipient string
	if err := c.Make(t.Context(), "tpm2", func(r string) error { recipient = r; return nil }); err != nil {
		t.Fatal(err)
	}
	if got := decrypted(t, c); got.Recipient().String() != recipient {
		t.Error("the TPM keeps another key than the one that was sealed to")
	}
	stop()
	refused := func(what string) {
		t.Helper()
		if out, err := exec.Command("systemd-creds", "decrypt", "--name="+c.Name, c.File, "-").Output(); err == nil {
			t.Errorf("%s the key was given out: %d bytes", what, len(out))
		}
	}
	refused("without the TPM")
	stop = tpm(t, t.TempDir())
	refused("by another TPM")
	stop()
	tpm(t, state) // the same one after a reboot
	if got := decrypted(t, c); got.Recipient().String() != recipient {
		t.Error("after a reboot the TPM gives another key")
	}
}
