package supervise

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/instance"
)

// TestMain lets the test binary stand in for a daemon.
func TestMain(m *testing.M) {
	if how := os.Getenv("TAGOUT_FAKE"); how != "" {
		fake(how)
		return
	}
	os.Exit(m.Run())
}

// fake is a daemon that does little: it serves /healthz until SIGTERM, or fails in the way that how names.
func fake(how string) {
	switch how {
	case "port":
		fmt.Fprintln(os.Stderr, `{"level":"ERROR","msg":"starting","err":"binding 198.19.0.1:53: address already in use"}`)
		os.Exit(1)
	case "crash":
		fmt.Fprintln(os.Stderr, "panic: something broke\n\ngoroutine 1 [running]:\nmain.main()")
		os.Exit(2)
	case "sick":
		sleepForever()
	case "supervisor", "deaf supervisor":
		fakeSupervisor(how == "deaf supervisor")
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	if how == "stubborn" {
		signal.Ignore(unix.SIGTERM)
		ctx = context.Background()
	}
	if how == "fed" { // feeds its watchdog for as long as it runs
		go func() {
			for {
				daemon.SdNotify(false, daemon.SdNotifyWatchdog) // a lost word is what the watchdog is for
				time.Sleep(20 * time.Millisecond)
			}
		}()
	}
	if how == "helper" { // a child that outlives the daemon, in its cgroup
		if err := exec.Command("/bin/sleep", "1000").Start(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	dir := os.Getenv("TAGOUT_FAKE_DIR")
	if fd, err := strconv.Atoi(os.Getenv(instance.UnlockEnv)); err == nil {
		raw, err := io.ReadAll(os.NewFile(uintptr(fd), "key"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if err := os.WriteFile(filepath.Join(dir, "key"+strconv.Itoa(os.Getpid())), raw, 0o600); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	l, err := control.Listen(filepath.Join(dir, "http.sock"), os.Getgid())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "status"), status, 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	if err := control.Serve(ctx, l, ok, 0); err != nil {
		os.Exit(1)
	}
	if f, err := os.OpenFile(os.Getenv("TAGOUT_FAKE_ORDER"), os.O_APPEND|os.O_WRONLY, 0); err == nil {
		fmt.Fprintln(f, os.Getenv("TAGOUT_FAKE_NAME"))
		f.Close()
	}
}

// fakeSupervisor holds an instance's lock until SIGTERM, or for ever where it is deaf.
func fakeSupervisor(deaf bool) {
	inst, err := instance.New(os.Getenv("TAGOUT_FAKE_NAME"), 9)
	if err == nil {
		_, err = lock(inst)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	fmt.Println("locked")
	<-ctx.Done()
	if deaf {
		sleepForever()
	}
}

// sleepForever blocks without looking like a deadlock to Go's runtime, which ends a program whose goroutines
// all wait for each other.
func sleepForever() {
	for {
		time.Sleep(time.Hour)
	}
}
