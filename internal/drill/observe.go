package drill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// fresh is how recent an event must be to count as "just now".
const fresh = 150 * time.Millisecond

// Least activity that must have been seen before the order.
const (
	leastTicks   = 10
	leastBulk    = 1 << 20
	leastUses    = 5
	leastReplays = 20
)

// Activity is what observers outside the kid see of it at one moment. Ages are the time since the last event,
// negative where there was none.
type Activity struct {
	Processes     int              `json:"processes"`      // in its cgroup
	Ticks         int64            `json:"ticks"`          // that reached the sink
	Uses          int              `json:"token_uses"`     // by the agent, accepted by the vendor's API
	Replays       int              `json:"token_replays"`  // by the accomplice, accepted by the user's own service
	Signs         map[string]int64 `json:"signs"`          // of the technique
	ByteAge       time.Duration    `json:"byte_age_ns"`    // last byte from the kid anywhere
	CredentialAge time.Duration    `json:"accept_age_ns"`  // last accepted use by anybody
	UseAge        time.Duration    `json:"use_age_ns"`     // by the agent
	ReplayAge     time.Duration    `json:"replay_age_ns"`  // by the accomplice
	AttackerBytes int64            `json:"attacker_bytes"` // ever
}

// beaconMissing names what of the beacon is not at work just now; "" means that all of it is.
func (a Activity) beaconMissing() string {
	recent := func(age time.Duration) bool { return age >= 0 && age <= fresh }
	var out []string
	check := func(ok bool, format string, args ...any) {
		if !ok {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	check(a.Ticks >= leastTicks && recent(a.ByteAge), "ticks (%d so far)", a.Ticks)
	check(a.Uses >= leastUses && recent(a.UseAge), "its token accepted (%d times so far)", a.Uses)
	check(a.Replays >= leastReplays && recent(a.ReplayAge), "the accomplice's token accepted (%d times so far)", a.Replays)
	return strings.Join(out, ", ")
}

// observer looks at one kid from outside.
type observer struct {
	net    *practice.Internet
	tag    string
	cgroup string
	mark   uint32
	passed func(mark uint32) (time.Duration, error) // CLOCK_BOOTTIME; may be nil
	family family
}

func (d *duel) newObserver(kid wire.Kid) *observer {
	return &observer{net: d.Internet, tag: d.kid, cgroup: kid.Cgroup, mark: kid.Mark, passed: d.Passed}
}

// lastByte is when the kid's last byte reached the practice internet, by whatever road, or when the kernel last
// let a packet of it pass, where that is known. It sees also what the practice internet does not, such as lookups.
func (o *observer) lastByte() time.Duration {
	last := max(o.net.Sink.LastByte(o.tag), o.net.API.LastRequest("agent:"+o.tag))
	if o.passed == nil {
		return last
	}
	at, err := o.passed(o.mark)
	if err != nil || at == 0 {
		return last // the kernel knows no such session any more, or the maps are out of reach
	}
	return max(last, at-bootclock.Now()+practice.Now())
}

// lastAccepted is when the kid's token was last accepted, whoever held it.
func (o *observer) lastAccepted() time.Duration {
	return max(o.net.API.Uses.Tally("agent:"+o.tag).LastAccepted, o.net.Own.Uses.Tally("accomplice:"+o.tag).LastAccepted)
}

func (o *observer) activity(signs []Sign) Activity {
	uses, replayed := o.net.API.Uses.Tally("agent:"+o.tag), o.net.Own.Uses.Tally("accomplice:"+o.tag)
	a := Activity{Uses: uses.Accepted, Replays: replayed.Accepted, Signs: map[string]int64{}}
	for _, st := range o.net.Sink.Streams(o.tag) {
		a.Ticks += st.Ticks
	}
	pids, err := cgroup.Procs(o.cgroup)
	if err == nil {
		a.Processes = len(pids)
	}
	for _, s := range signs {
		a.Signs[s.String()] = o.count(s)
	}
	_, a.AttackerBytes = o.net.Attacker.Total()
	now := practice.Now()
	a.ByteAge, a.CredentialAge = age(now, o.lastByte()), age(now, o.lastAccepted())
	a.UseAge, a.ReplayAge = age(now, uses.LastAccepted), age(now, replayed.LastAccepted)
	return a
}

func age(now, then time.Duration) time.Duration {
	if then == 0 {
		return -1
	}
	return now - then
}

// signsMissing names the signs of which there is not enough.
func (c Config) signsMissing(a Activity, signs []Sign) string {
	var out []string
	for _, s := range signs {
		if n, want := a.Signs[s.String()], c.least(s); n < want {
			out = append(out, fmt.Sprintf("%s (%d of %d)", s, n, want))
		}
	}
	return strings.Join(out, ", ")
}

// emptyWatch waits for the kid's cgroup to hold no process any more.
type emptyWatch struct {
	empty chan time.Duration // gets the moment, once
	stop  func()
}

func (o *observer) watchEmpty(ctx context.Context) *emptyWatch {
	ctx, cancel := context.WithCancel(ctx)
	w := &emptyWatch{empty: make(chan time.Duration, 1), stop: cancel}
	go func() {
		if cgroup.WaitEmpty(ctx, o.cgroup) == nil {
			w.empty <- practice.Now()
		}
	}()
	return w
}

// verdicts holds, for each layer, how long after the command the last sign of life was seen; a layer that is
// missing still lived at the end.
type verdicts map[wire.Layer]time.Duration

// settle waits until all the layers are seen stopped, or long enough to say that they are not. It may be called
// again, to see whether they stayed so.
func (o *observer) settle(ctx context.Context, layers []wire.Layer, command, within time.Duration, w *emptyWatch, seen verdicts) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	began := practice.Now()
	practice.Wait(ctx, "the stop takes effect", func() bool { // what is missing is the answer
		for _, l := range layers {
			o.look(l, command, w, seen)
		}
		// Long enough also for what was not ordered to be seen alive, or dying of the rest.
		return len(seen) == len(layers) && practice.Now()-max(began, command) >= quiet
	})
}

func (o *observer) look(l wire.Layer, command time.Duration, w *emptyWatch, seen verdicts) {
	var last time.Duration
	switch l {
	case wire.LayerSession:
		select {
		case at := <-w.empty:
			seen[l] = at - command
		default:
		}
		return
	case wire.LayerNetwork:
		last = o.lastByte()
	case wire.LayerCredential:
		last = o.lastAccepted()
	}
	delete(seen, l) // what spoke again was not stopped
	if practice.Now()-max(last, command) >= quiet {
		seen[l] = max(0, last-command)
	}
}

// leftBehind names living processes of the kid outside its cgroup, after the cgroup was seen empty.
func (o *observer) leftBehind() string {
	living := o.family.living()
	if len(living) == 0 {
		return ""
	}
	slices.SortFunc(living, func(a, b process) int { return a.pid - b.pid })
	return fmt.Sprintf("%d processes of the kid live outside its cgroup, the first %d (%s) in state %c",
		len(living), living[0].pid, living[0].comm, living[0].state)
}
