package drill

import (
	"context"
	"fmt"
	"strings"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// fresh is how recent an event must be to count as "just now".
const fresh = 150 * time.Millisecond

// Least activity that must have been seen before the order.
const (
	leastTicks   = 20
	leastBulk    = 1 << 20
	leastUses    = 5
	leastReplays = 20
)

// Activity is what observers outside the kid see of it at one moment. Ages are the time since the last event,
// negative where there was none.
type Activity struct {
	Processes     int           `json:"processes"`      // in its cgroup
	ForksRefused  int64         `json:"forks_refused"`  // by the pids limit, as the agent told the sink
	Ticks         int64         `json:"ticks"`          // that reached the sink
	Bulk          int64         `json:"bulk_bytes"`     // that reached the sink
	Uses          int           `json:"token_uses"`     // by the agent, accepted by the vendor's API
	Replays       int           `json:"token_replays"`  // by the accomplice, accepted by the user's own service
	ByteAge       time.Duration `json:"byte_age_ns"`    // last byte from the kid anywhere
	CredentialAge time.Duration `json:"accept_age_ns"`  // last accepted use by anybody
	UseAge        time.Duration `json:"use_age_ns"`     // by the agent
	ReplayAge     time.Duration `json:"replay_age_ns"`  // by the accomplice
	AttackerBytes int64         `json:"attacker_bytes"` // ever
}

// missing names what is not at work just now; "" means that everything is.
func (a Activity) missing(processes int) string {
	recent := func(age time.Duration) bool { return age >= 0 && age <= fresh }
	var out []string
	check := func(ok bool, format string, args ...any) {
		if !ok {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	check(a.Processes >= processes, "%d processes of %d", a.Processes, processes)
	check(a.ForksRefused > 0, "its pids limit hit")
	check(a.Ticks >= leastTicks && recent(a.ByteAge), "ticks (%d so far)", a.Ticks)
	check(a.Bulk >= leastBulk, "bulk data (%d bytes so far)", a.Bulk)
	check(a.Uses >= leastUses && recent(a.UseAge), "its token accepted (%d times so far)", a.Uses)
	check(a.Replays >= leastReplays && recent(a.ReplayAge), "the accomplice's token accepted (%d times so far)", a.Replays)
	return strings.Join(out, ", ")
}

// observer looks at one kid from outside.
type observer struct {
	net    *practice.Internet
	tag    string
	cgroup string
}

func newObserver(net *practice.Internet, tag, cgroupDir string) *observer {
	return &observer{net: net, tag: tag, cgroup: cgroupDir}
}

// lastByte is when the kid's last byte reached the practice internet, by whatever road.
func (o *observer) lastByte() time.Duration {
	return max(o.net.Sink.LastByte(o.tag), o.net.API.LastRequest("agent:"+o.tag))
}

// lastAccepted is when the kid's token was last accepted, whoever held it.
func (o *observer) lastAccepted() time.Duration {
	return max(o.net.API.Uses.Tally("agent:"+o.tag).LastAccepted, o.net.Own.Uses.Tally("accomplice:"+o.tag).LastAccepted)
}

func (o *observer) activity() Activity {
	uses, replayed := o.net.API.Uses.Tally("agent:"+o.tag), o.net.Own.Uses.Tally("accomplice:"+o.tag)
	a := Activity{Uses: uses.Accepted, Replays: replayed.Accepted}
	for _, st := range o.net.Sink.Streams(o.tag) {
		if st.Kind == "bulk" {
			a.Bulk += st.Bytes
		}
		a.Ticks += st.Ticks
		a.ForksRefused = max(a.ForksRefused, st.Refusals)
	}
	pids, err := cgroup.Procs(o.cgroup)
	if err == nil {
		a.Processes = len(pids)
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

// settle waits until all the ordered layers are seen stopped, or long enough to say that they are not.
func (o *observer) settle(ctx context.Context, layers []wire.Layer, command time.Duration, w *emptyWatch) verdicts {
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	seen := verdicts{}
	practice.Wait(ctx, "the stop takes effect", func() bool { // what is missing is the answer
		for _, l := range layers {
			o.look(l, command, w, seen)
		}
		// Long enough also for what was not ordered to be seen alive, or dying of the rest.
		return len(seen) == len(layers) && practice.Now()-command >= quiet
	})
	return seen
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
