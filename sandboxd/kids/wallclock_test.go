package kids

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tagout/internal/bootclock"
	"tagout/internal/wire"
)

// wall sets this process's wall clock, and nobody else's: all that asks the vDSO for it (vdso(7)), as Go does, is sent to code
// that asks the kernel and adds an offset.
type wall struct{ seconds *int64 }

func newWall() (*wall, error) {
	if runtime.GOARCH != "amd64" {
		return nil, errors.New("the code below is for amd64")
	}
	at, err := vdsoSymbol("__vdso_clock_gettime")
	if err != nil {
		return nil, err
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, err
	}
	copy(page, []byte{
		0xb8, unix.SYS_CLOCK_GETTIME, 0, 0, 0, // mov eax, SYS_clock_gettime
		0x0f, 0x05, // syscall
		0x85, 0xff, // test edi, edi: CLOCK_REALTIME is 0
		0x75, 0x0a, // jnz to the end
		0x48, 0x8b, 0x0d, 6, 0, 0, 0, // mov rcx, [seconds]
		0x48, 0x01, 0x0e, // add [rsi], rcx
		0xc3, // ret
	})
	start := uintptr(unsafe.Pointer(&page[0]))
	jump := append(binary.LittleEndian.AppendUint64([]byte{0x48, 0xb8}, uint64(start)), 0xff, 0xe0) // mov rax, start; jmp rax
	mem, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	_, err = mem.WriteAt(jump, int64(at))
	return &wall{(*int64)(unsafe.Pointer(&page[24]))}, errors.Join(err, mem.Close())
}

// set makes the wall clock differ from the machine's.
func (w *wall) set(by time.Duration) { atomic.StoreInt64(w.seconds, int64(by/time.Second)) }

// vdsoSymbol returns where this process has a function of the vDSO's.
func vdsoSymbol(name string) (uint64, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0, err
	}
	var from, to uint64
	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
				return 0, err
			}
		}
	}
	mem, err := os.Open("/proc/self/mem")
	if err != nil {
		return 0, err
	}
	defer mem.Close() // only read
	image := make([]byte, to-from)
	if _, err := mem.ReadAt(image, int64(from)); err != nil {
		return 0, err
	}
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return 0, err
	}
	symbols, err := f.DynamicSymbols()
	i := slices.IndexFunc(symbols, func(s elf.Symbol) bool { return s.Name == name })
	if err != nil || i < 0 {
		return 0, fmt.Errorf("this kernel's vDSO has no %s: %w", name, err)
	}
	return from + symbols[i].Value, nil
}

// wallVerbs are what runAsked does with the wall clock.
func wallVerbs(ctx context.Context, m *Manager) map[string]func(string) error {
	var w *wall
	set := func(by string) error {
		d, err := time.ParseDuration(by)
		if err == nil && w == nil {
			w, err = newWall()
		}
		if err != nil {
			return err
		}
		before, boot := time.Now().Round(0), bootclock.Now() // Round: without the monotonic clock
		was := time.Duration(*w.seconds) * time.Second
		w.set(d)
		if moved := time.Now().Round(0).Sub(before) - (bootclock.Now() - boot); (moved - (d - was)).Abs() > time.Second {
			return fmt.Errorf("the wall clock moved by %v, want %v", moved, d-was)
		}
		return nil
	}
	spawn := func(lifetime, idle time.Duration) func(string) error {
		return func(name string) error {
			p := plan()
			p.Lifetime, p.Idle = lifetime, idle
			_, err := m.Spawn(ctx, Request{Name: name, Purpose: "test", Plan: p})
			return err
		}
	}
	return map[string]func(string) error{
		"run":        func(string) error { go m.Run(ctx); return nil },
		"wall":       set,
		"spawn old":  spawn(brief, time.Hour),
		"spawn idle": spawn(time.Hour, brief),
		"spawn long": spawn(time.Hour, time.Hour),
		"timeout": func(by string) error { // the clock is set while the command runs
			began := bootclock.Now()
			up := make(chan error, 1)
			r := wire.ExecRequest{Argv: []string{"sh", "-c", "echo up; exec sleep 1000"}, Timeout: time.Second}
			var exit *wire.ExecExit
			err := m.Exec(ctx, "long", "test", r, func(f wire.ExecFrame) error {
				if len(f.Stdout) > 0 {
					up <- set(by)
				}
				if f.Exit != nil {
					exit = f.Exit
				}
				return nil
			})
			if took := bootclock.Now() - began; err == nil && (exit == nil || exit.Result != resultTimeout || took < time.Second || took > 3*time.Second) {
				err = fmt.Errorf("a command with a timeout of 1 s ended after %v: %+v", took, exit)
			}
			return errors.Join(err, <-up)
		},
		"gone": func(name string) error {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.kids[name] != nil {
				return errors.New("it is there")
			}
			return nil
		},
	}
}

// brief is a short life.
const brief = 3 * time.Second

// TestTheWallClockJumps, in both directions, while kids live and while sandboxd is down: lifetimes, idle limits and timeouts
// are what they were. The control is in setting the clock, which is looked at.
func TestTheWallClockJumps(t *testing.T) {
	for _, jump := range []string{"240h", "-240h"} {
		t.Run(jump, func(t *testing.T) {
			c := newCrowded(t)
			c.want("run: ")
			c.want("spawn long: long")
			began := bootclock.Now()
			c.want("spawn old: old")
			c.want("spawn idle: idle")
			c.want("timeout: " + jump)
			for _, kid := range []string{"old", "idle"} {
				eventually(t, kid+" to be gone", func() bool { a, _ := c.ask("gone: " + kid); return a.Error == "" })
				if took := bootclock.Now() - began; took < brief || took > brief+5*time.Second {
					t.Errorf("%s lived for %v, want %v", kid, took, brief)
				}
			}
			c.want("exec: long") // it did not go with them
			c.end()              // and now the clock jumps while sandboxd is down, and back
			for _, jump := range []string{"0s", jump} {
				c.start()
				c.want("wall: " + jump)
				c.want("run: ")
				c.want("spawn old: old")
				eventually(t, "old to be gone again", func() bool { a, _ := c.ask("gone: old"); return a.Error == "" })
				c.want("exec: long")
				c.end()
			}
			c.start()
			c.want("destroy: long")
			c.end()
			c.wantNothingLeft()
		})
	}
}
