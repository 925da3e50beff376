package kids

import (
	"fmt"
	"os"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
)

// indexOf finds out which index a kid has whose record and document are lost: from the uid range of whatever
// still runs in it. 0 where nothing does. Until that has ended, nobody else may get the range.
func (m *Manager) indexOf(name string) int {
	pids, err := cgroup.Procs(m.cfg.Cgroups.V2(m.cgroupRel(name)))
	if err != nil {
		return 0 // the cgroup is gone, and with it all that was in it
	}
	for _, pid := range pids {
		var inside, first, count uint32
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
		if err != nil {
			continue // it has ended
		}
		if _, err := fmt.Sscan(string(raw), &inside, &first, &count); err != nil {
			continue
		}
		for index := 1; index <= instance.MaxKids; index++ {
			if own, _ := m.cfg.Inst.KidUIDRange(index); own == first {
				return index
			}
		}
	}
	return 0
}
