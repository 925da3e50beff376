package box

import (
	"tagout/internal/config"
	"tagout/internal/netfw"
)

// Caller is a Config that names what credd may call; without it credd calls nobody.
type Caller interface{ Called() []config.Called }

func callsOf(called []config.Called) []netfw.Call {
	var out []netfw.Call
	for _, c := range called {
		out = append(out, netfw.Call{To: c.Addr, Port: c.Port})
		if c.DNS {
			out = append(out, netfw.Call{To: c.Addr, Port: c.Port, UDP: true})
		}
	}
	return out
}
