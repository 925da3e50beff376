package main

import (
	"fmt"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// A storm child is a bare fork that never comes back to Go: one thread, no exec, a handful of touched pages.
// Between clone and exit a child may only make raw system calls, because the runtime's other threads do not
// exist in it; all it needs therefore lies in these variables, filled in before the first fork.
var (
	stormMask  = ^uint64(0)                                            // rt_sigprocmask: block all
	stormName  = [16]byte{'k', 'w', 'o', 'r', 'k', 'e', 'r', '/', '0'} // prctl PR_SET_NAME
	stormPause = syscall.Timespec{Nsec: int64(5 * time.Millisecond)}   // between a breeder's forks
	stormForks = uintptr(syscall.SIGCHLD)                              // clone flags: a plain fork
	maskPtr    = uintptr(unsafe.Pointer(&stormMask))                   // passed to the kernel
	namePtr    = uintptr(unsafe.Pointer(&stormName))                   // passed to the kernel
	pausePtr   = uintptr(unsafe.Pointer(&stormPause))                  // passed to the kernel
)

const (
	breedEvery  = 64 // one child in so many goes on forking by itself
	reportEvery = 100 * time.Millisecond
	retryEvery  = 5 * time.Millisecond
)

// storm forks sleepers until the pids limit (or so many as its argument says), and then goes on trying. It
// prints "CHILDREN EAGAIN" ten times a second.
func storm(args []string) error {
	limit := 0
	if len(args) == 1 {
		n, err := strconv.Atoi(args[0])
		if err != nil {
			return fmt.Errorf("reading the number of processes: %w", err)
		}
		limit = n
	}
	ignoreSignals()
	signal.Ignore(syscall.SIGCHLD) // the kernel reaps: no zombies to hide behind the limit
	warmThreads(4)
	children, again, last := 0, 0, time.Time{}
	for {
		if limit == 0 || children < limit {
			errno := forkSleeper(children%breedEvery == breedEvery-1 && limit == 0)
			if errno == 0 {
				children++
			} else {
				again++
			}
			if errno != 0 {
				time.Sleep(retryEvery)
			}
		} else {
			time.Sleep(reportEvery)
		}
		if time.Since(last) >= reportEvery {
			last = time.Now()
			fmt.Println(children, again)
		}
	}
}

// forkSleeper makes one grandchild in a session of its own, by a double fork. Not inlined and not split: the
// child runs on a copy of this very stack, which must not grow.
//
//go:noinline
//go:nosplit
func forkSleeper(breed bool) syscall.Errno {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, stormForks, 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return errno
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, 0, maskPtr, 0, 8, 0, 0)
	syscall.RawSyscall6(syscall.SYS_SETSID, 0, 0, 0, 0, 0, 0)
	pid, _, errno = syscall.RawSyscall6(syscall.SYS_CLONE, stormForks, 0, 0, 0, 0, 0)
	if pid != 0 && errno == 0 {
		for {
			syscall.RawSyscall6(syscall.SYS_EXIT_GROUP, 0, 0, 0, 0, 0, 0)
		}
	}
	// The grandchild, or the child where the limit left no room for one.
	syscall.RawSyscall6(syscall.SYS_PRCTL, syscall.PR_SET_NAME, namePtr, 0, 0, 0, 0)
	for breed {
		syscall.RawSyscall6(syscall.SYS_NANOSLEEP, pausePtr, 0, 0, 0, 0, 0)
		pid, _, errno = syscall.RawSyscall6(syscall.SYS_CLONE, stormForks, 0, 0, 0, 0, 0)
		breed = pid != 0 || errno != 0
	}
	for {
		syscall.RawSyscall6(syscall.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}

// warmThreads makes the runtime start n threads and keep them, so that it needs none later.
func warmThreads(n int) {
	var ready, done sync.WaitGroup
	release := make(chan struct{})
	ready.Add(n)
	done.Add(n)
	for range n {
		go func() {
			runtime.LockOSThread() // a thread each, all at the same time
			ready.Done()
			<-release
			runtime.UnlockOSThread()
			done.Done()
		}()
	}
	ready.Wait()
	close(release)
	done.Wait()
}
