package execsocket

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"tagout/internal/wire"
)

// decode reads one JSON document, strictly.
func decode(raw []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON value")
	}
	return nil
}

// DecodeInput reads one message of a caller.
func DecodeInput(raw []byte) (wire.ExecInput, error) {
	var in wire.ExecInput
	if err := decode(raw, &in); err != nil {
		return wire.ExecInput{}, err
	}
	set := 0
	for _, is := range []bool{len(in.Stdin) > 0, in.EOF, in.Resize != nil, in.Detach} {
		if is {
			set++
		}
	}
	switch {
	case set != 1:
		return wire.ExecInput{}, fmt.Errorf("%d of stdin, eof, resize and detach are set: give exactly one", set)
	case len(in.Stdin) > wire.ExecMaxPiece:
		return wire.ExecInput{}, fmt.Errorf("%d bytes of input at once: send at most %d", len(in.Stdin), wire.ExecMaxPiece)
	}
	return in, nil
}
