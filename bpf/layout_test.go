package bpf

import (
	"encoding/binary"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/session"
)

func mustSpec(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := loadTagout()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func btfEnum(t *testing.T, name string) map[string]uint64 {
	t.Helper()
	var e *btf.Enum
	if err := mustSpec(t).Types.TypeByName(name, &e); err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, v := range e.Values {
		out[v.Name] = v.Value
	}
	return out
}

// The committed object and internal/reason must agree on every number below 32, in both directions.
func TestReasonsAreThoseOfTheTable(t *testing.T) {
	want := map[string]uint64{}
	for code, info := range reason.All() {
		if code < 32 {
			want["REASON_"+strings.ToUpper(strings.ReplaceAll(info.Word, "-", "_"))] = uint64(code)
		}
	}
	if got := btfEnum(t, "tagout_reason"); !reflect.DeepEqual(got, want) {
		t.Errorf("verdict.h has\n%v\ninternal/reason has\n%v", got, want)
	}
}

func TestHooksHaveNames(t *testing.T) {
	for name, n := range btfEnum(t, "hook") {
		if strings.HasPrefix(Hook(n).String(), "hook-") {
			t.Errorf("%s = %d has no name", name, n)
		}
	}
	if got := Hook(200).String(); got != "hook-200" {
		t.Errorf("unknown hook is called %q", got)
	}
}

// Go structs and C structs must have the same fields at the same offsets.
func TestLayoutsMatchBTF(t *testing.T) {
	for name, goType := range map[string]any{
		"session": tagoutSession{}, "port_key": tagoutPortKey{}, "reach_key": tagoutReachKey{}, "proc": tagoutProc{}, "flow_key": tagoutFlowKey{}, "syn_key": tagoutSynKey{},
		"tally": tagoutTally{}, "event": tagoutEvent{}, "flood_key": tagoutFloodKey{}, "flood": tagoutFlood{}, "layout_info": tagoutLayoutInfo{},
		"exec_event": tagoutExecEvent{}, "exec_count": tagoutExecCount{},
	} {
		var c *btf.Struct
		if err := mustSpec(t).Types.TypeByName(name, &c); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		rt := reflect.TypeOf(goType)
		if int(c.Size) != int(rt.Size()) || binary.Size(goType) != int(c.Size) {
			t.Errorf("%s: %d bytes in C, %d in Go, %d encoded", name, c.Size, rt.Size(), binary.Size(goType))
		}
		var fields []reflect.StructField
		for i := range rt.NumField() {
			if f := rt.Field(i); f.Name != "_" {
				fields = append(fields, f)
			}
		}
		if len(fields) != len(c.Members) {
			t.Errorf("%s: %d members in C, %d in Go", name, len(c.Members), len(fields))
			continue
		}
		for i, m := range c.Members {
			flat := strings.ReplaceAll(m.Name, "_", "")
			if !strings.EqualFold(flat, fields[i].Name) || int(m.Offset.Bytes()) != int(fields[i].Offset) {
				t.Errorf("%s.%s at %d in C, %s at %d in Go", name, m.Name, m.Offset.Bytes(), fields[i].Name, fields[i].Offset)
			}
		}
	}
}

// Pinned layouts outlive builds. Whoever changes one sees this fail and must raise TAGOUT_LAYOUT with it.
func TestLayoutIsThatOfItsVersion(t *testing.T) {
	const want = `8 counters Hash 4 776 1024
8 events RingBuf 0 0 1048576
8 exec_counts Hash 4 32 1024
8 exec_scratch PerCPUArray 4 1408 1
8 exec_told Hash 4 8 1024
8 execs RingBuf 0 0 1048576
8 floods LRUHash 28 32 8192
8 flows LRUHash 8 32 65536
8 kid_cgroups Hash 8 4 1024
8 kid_links Hash 4 4 1024
8 layout Array 4 4 1
8 leases Hash 4 8 1024
8 lost Array 4 8 2
8 ports Hash 8 1 16384
8 reach LPMTrie 16 1 16384
8 revoked Hash 4 8 1024
8 sessions Hash 4 20 1024
8 sockets LRUHash 8 32 65536
8 stop_all Array 4 4 1
8 stopped Hash 4 8 1024
8 syns LRUHash 8 32 16384
`
	var got strings.Builder
	spec := mustSpec(t)
	for _, name := range sortedMaps(spec) {
		m := spec.Maps[name]
		fmt.Fprintf(&got, "%d %s %v %d %d %d\n", layoutVersion, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries)
	}
	if got.String() != want {
		t.Errorf("maps are now\n%swere\n%s", got.String(), want)
	}
}

func TestConstantsOfTheHeaders(t *testing.T) {
	for file, wants := range map[string]map[string]int{
		"maps.h":    {"TAGOUT_LAYOUT": layoutVersion, "REASONS": len(tagoutTally{}.Denied), "MARK_SECRET": session.SecretBit, "SESSION_HOST_NETWORK": hostNetwork, "REACH_FIXED": reachFixed},
		"verdict.h": {"PORT_DNS": instance.PortDNS, "PORT_PROXY": instance.PortExplicit},
	} {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range wants {
			m := regexp.MustCompile(`(?m)^#define ` + name + ` (\d+)`).FindSubmatch(src)
			if m == nil || string(m[1]) != strconv.Itoa(want) {
				t.Errorf("%s: %s is %q, Go has %d", file, name, m, want)
			}
		}
	}
}

func TestNamesFitTheKernel(t *testing.T) {
	spec := mustSpec(t)
	const most = 15 // BPF_OBJ_NAME_LEN less the final 0: longer names are cut and would not be recognised
	for name := range spec.Programs {
		if len(name) > most {
			t.Errorf("program name %s is too long", name)
		}
	}
	for _, name := range sortedMaps(spec) {
		if len(name) > most {
			t.Errorf("map name %s is too long", name)
		}
	}
	hooks := append(append(append([]hook{}, kidHooks...), daemonHooks...), linkHooks...)
	if others := 1; len(hooks)+others != len(spec.Programs) { // tagout_exec is the machine's, and has no place in a list
		t.Errorf("%d programs, %d of them have a place", len(spec.Programs), len(hooks)+others)
	}
}
