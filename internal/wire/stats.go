package wire

import "time"

// KidStats is what a kid's processes use, and have used since its spawn, as the kernel counts it in its cgroup. What the
// kernel of that machine does not count is left out, and so is a limit where there is none.
type KidStats struct {
	Kid    string      `json:"kid"`
	State  KidState    `json:"state"`
	Time   time.Time   `json:"time"`
	CPU    CPUStats    `json:"cpu"`
	Memory MemoryStats `json:"memory"`
	PIDs   PIDStats    `json:"pids"`
	IO     *IOStats    `json:"io,omitempty"`
}

// CPUStats is processor time.
type CPUStats struct {
	User      time.Duration  `json:"user_ns"`
	System    time.Duration  `json:"system_ns"`
	Throttled *time.Duration `json:"throttled_ns,omitempty"` // waited because of the limit, all processors together
	Limit     float64        `json:"limit,omitempty"`        // processors
}

// MemoryStats is in bytes. What the kid wrote to its writable places is part of it.
type MemoryStats struct {
	Current uint64  `json:"current"`
	Peak    *uint64 `json:"peak,omitempty"`
	Limit   uint64  `json:"limit,omitempty"`
}

// PIDStats counts processes and threads.
type PIDStats struct {
	Current uint64 `json:"current"`
	Limit   uint64 `json:"limit,omitempty"`
}

// IOStats is what went from and to the machine's disks.
type IOStats struct {
	ReadBytes    uint64 `json:"read_bytes"`
	WrittenBytes uint64 `json:"written_bytes"`
	Reads        uint64 `json:"reads"`
	Writes       uint64 `json:"writes"`
}
