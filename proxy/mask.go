package proxy

import (
	"bytes"
	"io"
)

// minMasked is the shortest secret that is masked in answers: shorter ones would blank ordinary text.
const minMasked = 6

// mask blanks secrets in a stream, byte for byte, so that lengths stay. It holds back only bytes that may be
// the beginning of a secret, and nothing for longer than the stream lasts.
type mask struct {
	values [][]byte
	held   []byte // may be the beginning of a secret
	ready  []byte // masked, not handed out yet
	err    error  // of the stream, once held is handed out
}

// newMask returns a mask for the secrets, nil where there is nothing to mask.
func newMask(secrets []secret) *mask {
	m := &mask{}
	for _, s := range secrets {
		if len(s.value) >= minMasked {
			m.values = append(m.values, []byte(s.value))
		}
	}
	if len(m.values) == 0 {
		return nil
	}
	return m
}

// read reads from r into p. A nil mask reads straight through.
func (m *mask) read(r io.Reader, p []byte) (int, error) {
	if m == nil {
		return r.Read(p)
	}
	for len(m.ready) == 0 {
		if m.err != nil {
			return 0, m.err
		}
		n, err := r.Read(p)
		m.held = append(m.held, p[:n]...)
		m.err = err
		m.blank()
	}
	n := copy(p, m.ready)
	m.ready = m.ready[n:]
	return n, nil
}

// blank masks what is whole and moves everything that cannot be part of a secret any more to ready.
func (m *mask) blank() {
	for _, v := range m.values {
		for from := 0; ; {
			i := bytes.Index(m.held[from:], v)
			if i < 0 {
				break
			}
			for j := range v {
				m.held[from+i+j] = '*'
			}
			from += i + len(v)
		}
	}
	keep := 0
	if m.err == nil {
		for _, v := range m.values {
			keep = max(keep, overlap(m.held, v))
		}
	}
	cut := len(m.held) - keep
	m.ready = append(m.ready[:0:0], m.held[:cut]...)
	m.held = append(m.held[:0:0], m.held[cut:]...)
}

// overlap returns the length of the longest end of b that v begins with.
func overlap(b, v []byte) int {
	for n := min(len(b), len(v)-1); n > 0; n-- {
		if bytes.HasSuffix(b, v[:n]) {
			return n
		}
	}
	return 0
}
