// Command hostile is the uncooperative agent that drills and demos stop. It runs inside a kid, where it needs
// nothing but itself. It does no harm beyond its own cgroup: it ignores signals, forks up to its limit, sends
// what it may, tries every way around what it may not, and never gives up.
//
//	hostile whoami URL                  use the token in $VENDOR_API_KEY once, say what came of it
//	hostile try N NAME KIND ADDR [ARG]  one way out; prints one line
//	hostile dnsleak [flags] DOMAIN      carry data out in names below DOMAIN
//	hostile fetch METHOD URL            no harm: what Go's own HTTP client makes of the road out
//	hostile pairs URL N                 no harm: how long requests take with the token and without it
//	hostile agent [flags]               everything at once, or one -technique, for ever
//	hostile techniques                  the ways of resisting that it knows, as JSON
//
// The other subcommands (detach, core, storm, technique) are the agent's own parts; hold-disk is run outside the
// kid, by the drill. Exit codes: 0 done (try: also where
// the way is denied), 1 whoami or fetch was refused, 2 a mistake in the arguments.
package main

import (
	"context"
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		usage("which subcommand?")
	}
	args := os.Args[2:]
	var err error
	switch os.Args[1] {
	case "whoami":
		err = whoami(context.Background(), os.Stdout, args)
	case "try":
		err = try(context.Background(), os.Stdout, args)
	case "dnsleak":
		err = dnsleak(context.Background(), os.Stdout, args)
	case "fetch":
		err = fetch(context.Background(), os.Stdout, args)
	case "pairs":
		err = pairs(context.Background(), os.Stdout, args)
	case "agent":
		err = agent(args)
	case "detach":
		err = detach(args)
	case "core":
		err = core(args)
	case "storm":
		err = storm(args)
	case "technique":
		err = playTechnique(args)
	case "techniques":
		err = listTechniques(os.Stdout)
	case "hold-disk":
		err = holdDisk(os.Stdin, os.Stdout, args)
	default:
		usage("unknown subcommand " + os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hostile:", err)
		os.Exit(1)
	}
}

func usage(why string) {
	fmt.Fprintf(os.Stderr, "hostile: %s\nusage: hostile whoami URL | try N NAME KIND ADDR [ARG] | dnsleak [flags] DOMAIN | fetch METHOD URL | pairs URL N | agent [flags] | techniques\n", why)
	os.Exit(2)
}
