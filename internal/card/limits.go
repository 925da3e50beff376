package card

import (
	"time"

	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// Defaults and bounds. The published schema repeats the counts.
const (
	defaultPIDs      = 128
	minPIDs          = 16 // kid-init and what waits for the next command are eight of them
	maxPIDs          = 32768
	defaultMemory    = 256 * mib
	minMemory        = 16 * mib
	maxMemory        = 256 * gib
	defaultCPUs      = 1.0
	minCPUs          = 0.05
	maxCPUs          = 256.0
	defaultOpenFiles = 1024
	minOpenFiles     = 64
	maxOpenFiles     = 65536
	defaultDiskRate  = 256 * mib
	minDiskRate      = 1 * mib
	maxDiskRate      = 64 * gib

	defaultIdle     = time.Hour
	defaultLifetime = 24 * time.Hour
	minLife         = time.Second
	maxLife         = 30 * 24 * time.Hour

	maxPerson = 64 // characters of a name

	minStopTime = 100 * time.Millisecond
	maxStopTime = 60 * time.Second
)

func readLimits(v yamlx.Value) Limits {
	m, _ := v.Map(limitKeys...)
	return Limits{
		PIDs:      readCount(m.Get("pids"), defaultPIDs, minPIDs, maxPIDs),
		Memory:    readSize(m.Get("memory"), defaultMemory, minMemory, maxMemory),
		CPUs:      readCores(m.Get("cpus"), defaultCPUs, minCPUs, maxCPUs),
		OpenFiles: uint64(readCount(m.Get("openFiles"), defaultOpenFiles, minOpenFiles, maxOpenFiles)), // in range
		DiskRate:  readSize(m.Get("diskRate"), defaultDiskRate, minDiskRate, maxDiskRate),
		Idle:      readLife(m.Get("idle"), defaultIdle),
		Lifetime:  readLife(m.Get("lifetime"), defaultLifetime),
	}
}

// readLife has no "never": a kid that is needed for longer than that is spawned anew.
func readLife(v yamlx.Value, def time.Duration) time.Duration {
	if d := readDuration(v, minLife, maxLife); d != 0 {
		return d
	}
	return def
}

// readStop has no defaults: a kid that nobody may stop in time does not start.
func (c *Card) readStop(v yamlx.Value) {
	m, _ := v.Map(stopKeys...)
	rules, canaries := readTrips(m.Get("trip"))
	c.Stop = session.Stop{
		Authority: readSentence(m.Need("authority"), maxPerson),
		MaxTime:   readDuration(m.Need("maxTime"), minStopTime, maxStopTime),
		Trip:      rules,
		Lease:     readStopLease(m.Get("lease")),
	}
	c.checkCanaries(canaries)
}
