// Command load is the client of the egress benchmark. It runs inside a kid, or in a plain network namespace
// beside it, does one kind of work for a while and prints what came of it as one JSON line.
//
//	load pour    one tunnel, as many bytes as go through it, in pieces that the server acknowledges
//	load ping    one tunnel, one byte to and fro
//	load open    new tunnels, each until the server has answered, several at a time
//	load hold    opens -count tunnels, prints how many stand, waits until the server ends them
//	load get     HTTPS requests on connections that stay open
//	load dns     A queries over UDP, a window of them always on the way; with -refused for a name that is to be refused
//
// A tunnel begins with a real ClientHello, so that a proxy can check the name, and with one TLS record for an
// answer; what follows is no TLS, so that no encryption is measured.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Result is what a run printed. Latencies are in microseconds, 0 where none were taken.
type Result struct {
	Count   int64   `json:"count"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Errors  int64   `json:"errors"`
	Example string  `json:"example,omitempty"` // the first error
	P50     float64 `json:"p50_us"`
	P99     float64 `json:"p99_us"`
	CPU     float64 `json:"cpu_us"` // processor time of this process, the kernel's on its behalf included
}

type options struct {
	to      string        // address to connect to
	connect string        // host:port to ask the proxy at -to for; "" goes straight there
	sni     string        // name in the ClientHello, the Host header or the query
	ca      string        // PEM file to trust; "" means the system's
	path    string        // of requests
	workers int           // how many at a time
	window  int           // queries on the way, each worker
	count   int           // tunnels to hold
	piece   int64         // bytes between two acknowledgements
	during  time.Duration // how long to go on
	pace    time.Duration // between two tunnels or requests of a worker
	refused bool          // queries that are refused are what counts
}

var works = map[string]func(options) (Result, error){
	"pour": pour, "ping": ping, "open": open, "hold": hold, "get": get, "dns": queries,
}

func main() {
	var o options
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	flags.StringVar(&o.to, "to", "", "")
	flags.StringVar(&o.connect, "connect", "", "")
	flags.StringVar(&o.sni, "sni", "", "")
	flags.StringVar(&o.ca, "ca", "", "")
	flags.StringVar(&o.path, "path", "/v1/hello", "")
	flags.IntVar(&o.workers, "workers", 1, "")
	flags.IntVar(&o.window, "window", 32, "")
	flags.IntVar(&o.count, "count", 1, "")
	flags.Int64Var(&o.piece, "piece", 64<<20, "")
	flags.DurationVar(&o.during, "for", time.Second, "")
	flags.DurationVar(&o.pace, "pace", 0, "")
	flags.BoolVar(&o.refused, "refused", false, "")
	if len(os.Args) < 2 || works[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: load pour|ping|open|hold|get|dns [flags]")
		os.Exit(2)
	}
	flags.Parse(os.Args[2:])
	r, err := works[os.Args[1]](o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
	report(r)
}

func report(r Result) {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		r.CPU = float64(u.Utime.Nano()+u.Stime.Nano()) / 1e3
	}
	json.NewEncoder(os.Stdout).Encode(r)
}

// percentiles fills in the latencies.
func (r *Result) percentiles(took []time.Duration) {
	if len(took) == 0 {
		return
	}
	slices.Sort(took)
	at := func(p int) float64 { return float64(took[min(len(took)*p/100, len(took)-1)].Nanoseconds()) / 1e3 }
	r.P50, r.P99 = at(50), at(99)
}
