package config

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"tagout/internal/lease"
)

func TestLeases(t *testing.T) {
	b, err := Parse("box.yaml", []byte(minimal+"leases: {kids: 1m, kernel: 4s}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (lease.Terms{Kids: time.Minute, Kernel: 4 * time.Second}); b.Leases != want {
		t.Errorf("read %+v, want %+v", b.Leases, want)
	}
	raw, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Parse("box.yaml", raw); err != nil || !reflect.DeepEqual(again, b) {
		t.Errorf("written and read again: %+v, %v, want %+v", again, err, b)
	}
	files, err := b.Compiled()
	if err != nil || !strings.Contains(string(files[lease.Name]), `"absent_ns": 20000000000`) {
		t.Errorf("what killswitchd reads: %q, %v", files, err)
	}
	raw, err = (&Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}).Marshal()
	if err != nil || strings.Contains(string(raw), "leases") {
		t.Errorf("without leases it writes %s, %v", raw, err)
	}
	for _, bad := range []string{"{kids: 1s}", "{kernel: 2s}", "{kernel: off}", "{watchdog: 0}", "{absent: 2h}", "{kid: 30s}", "5s", "{kids: 30}"} {
		_, err := Parse("box.yaml", []byte(minimal+"leases: "+bad+"\n"))
		if err == nil || !strings.Contains(err.Error(), "box.yaml:4:") {
			t.Errorf("leases: %s gives %v, want an error in line 4", bad, err)
		}
	}
}
