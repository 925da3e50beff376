package execsocket

import (
	"encoding/json"
	"reflect"
	"testing"

	"tagout/internal/wire"
)

// FuzzDecodeInput: whatever is accepted is exactly one thing within its bounds, and says the same again.
func FuzzDecodeInput(f *testing.F) {
	for _, in := range []wire.ExecInput{{Stdin: []byte("a\xff\x00")}, {EOF: true}, {Resize: &wire.TermSize{Rows: 1, Cols: 65535}}, {Detach: true}, {}} {
		raw, err := json.Marshal(in)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte(`{"stdin":"YQ==","stdin":"Yg=="}`))
	f.Add([]byte(`{"resize":null,"eof":true} `))
	f.Add([]byte(`{"stdin":[1,2]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		in, err := DecodeInput(raw)
		if err != nil {
			if !reflect.DeepEqual(in, wire.ExecInput{}) {
				t.Errorf("%q is refused and still gives %+v", raw, in)
			}
			return
		}
		set := 0
		for _, is := range []bool{len(in.Stdin) > 0, in.EOF, in.Resize != nil, in.Detach} {
			if is {
				set++
			}
		}
		if set != 1 || len(in.Stdin) > wire.ExecMaxPiece {
			t.Errorf("%q gives %d things and %d bytes", raw, set, len(in.Stdin))
		}
		again, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		same, err := DecodeInput(again)
		if len(in.Stdin) == 0 {
			in.Stdin, same.Stdin = nil, nil
		}
		if err != nil || !reflect.DeepEqual(in, same) {
			t.Errorf("%q: %+v, and again %+v %v", raw, in, same, err)
		}
	})
}
