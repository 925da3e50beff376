package config

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestKidLimits(t *testing.T) {
	head := "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"192.0.2.53:53\"]\n"
	b, err := Parse("box.yaml", []byte(head+"kidLimits: {kids: 9, kidsPerOwner: 3, queriesPerSecond: 50, opensPerSecond: 7, bufferedBytes: 6MiB}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (KidLimits{Kids: 9, KidsPerOwner: 3, Queries: 50, Opens: 7, Buffered: 6 << 20}); b.KidLimits != want {
		t.Errorf("read %+v, want %+v", b.KidLimits, want)
	}
	raw, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Parse("box.yaml", raw); err != nil || !reflect.DeepEqual(again, b) {
		t.Errorf("written and read again: %+v, %v, want %+v", again, err, b)
	}
	raw, err = (&Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}).Marshal()
	if err != nil || strings.Contains(string(raw), "kidLimits") {
		t.Errorf("without limits it writes %s, %v", raw, err)
	}
	for _, bad := range []string{"{queriesPerSecond: 0}", "{kids: 0}", "{kidsPerOwner: -1}", "{connections: -1}", "{opensPerSecond: 1000000000}", "{opens: 1}", "{bufferedBytes: 1MiB}", "{bufferedBytes: 134217728}", "{bufferedBytes: 128MB}", "7", "{connections: many}"} {
		_, err := Parse("box.yaml", []byte(head+"kidLimits: "+bad+"\n"))
		if err == nil || !strings.Contains(err.Error(), "box.yaml:4:") {
			t.Errorf("kidLimits: %s gives %v, want an error in line 4", bad, err)
		}
	}
}
