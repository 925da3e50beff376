package dnsfilter

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// newTestBatch returns a batch on a socket of its own, and the socket's address.
func newTestBatch(t *testing.T) (*batch, string) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	b, err := newBatch(c)
	if err != nil {
		t.Fatal(err)
	}
	return b, c.LocalAddr().String()
}

// answerAll sends each client's words, answers them all in one batch, and fails unless each client gets its answers,
// one datagram each, in order. It returns how many messages the answers made.
func answerAll(t *testing.T, b *batch, at string, said ...[]string) int {
	t.Helper()
	var clients []net.Conn
	total := 0
	for _, words := range said {
		d, err := net.Dial("udp4", at)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		for _, word := range words {
			if _, err := d.Write([]byte(word)); err != nil {
				t.Fatal(err)
			}
			total++
		}
		clients = append(clients, d)
	}
	n, err := b.receive() // datagrams on loopback are there once they were written
	if err != nil || n != total {
		t.Fatalf("received %d, %v", n, err)
	}
	for i := range n {
		raw, _ := b.query(i)
		b.reply(i, append(append(b.space(i), "re: "...), raw...))
	}
	if err := b.send(); err != nil {
		t.Fatal(err)
	}
	for i, d := range clients {
		for _, word := range said[i] {
			buf := make([]byte, 2000)
			d.SetReadDeadline(time.Now().Add(5 * time.Second))
			if n, err := d.Read(buf); err != nil || string(buf[:n]) != "re: "+word {
				t.Errorf("client %d got %q, %v, want %q", i, buf[:n], err, "re: "+word)
			}
		}
	}
	return b.msgs
}

// TestAnswersToOneAskerGoTogether: answers of one size to one asker are one message to the kernel and a datagram
// each to the asker; others are not drawn in. Where the kernel cuts no messages each is one.
func TestAnswersToOneAskerGoTogether(t *testing.T) {
	b, at := newTestBatch(t)
	var many []string
	for i := range batchLen {
		many = append(many, fmt.Sprintf("%1000d", i))
	}
	for _, apart := range []bool{false, true} {
		b.apart = apart
		for _, c := range []struct {
			name string
			want int
			said [][]string
		}{
			{"one", 1, [][]string{{"a"}}}, {"same size", 1, [][]string{{"aa", "bb", "cc"}}},
			{"another size between", 3, [][]string{{"aa", "bb", "c", "dd"}}}, {"two askers", 2, [][]string{{"aa", "bb"}, {"cc", "dd"}}},
			{"as many as there is room for", 1, [][]string{many}},
		} {
			want := c.want
			if apart {
				want = len(strings.Fields(strings.Trim(fmt.Sprint(c.said), "[]")))
			}
			if got := answerAll(t, b, at, c.said...); got != want {
				t.Errorf("%s, apart %v: %d messages, want %d", c.name, apart, got, want)
			}
		}
	}
}

// TestWhatIsNotTakenTogetherGoesApart: a message that the kernel refuses as a whole (here its pieces would be of a
// size that no device takes) is sent again in pieces, and the rest with it.
func TestWhatIsNotTakenTogetherGoesApart(t *testing.T) {
	b, at := newTestBatch(t)
	clients := make([]net.Conn, 2)
	for i := range clients {
		d, err := net.Dial("udp4", at)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		for range 3 {
			if _, err := d.Write([]byte("word")); err != nil {
				t.Fatal(err)
			}
		}
		clients[i] = d
	}
	if n, err := b.receive(); err != nil || n != 6 {
		t.Fatalf("received %d, %v", n, err)
	}
	for i := range 6 {
		raw, _ := b.query(i)
		b.reply(i, append(b.space(i), raw...))
	}
	if b.msgs != 2 {
		t.Fatalf("%d messages", b.msgs)
	}
	b.cuts[0].hdr.Type = unix.UDP_SEGMENT + 100 // EINVAL, as from a kernel that does not know it
	if err := b.send(); err != nil {
		t.Fatal(err)
	}
	if !b.apart {
		t.Error("it would be tried again and again")
	}
	for i, d := range clients {
		for range 3 {
			buf := make([]byte, 64)
			d.SetReadDeadline(time.Now().Add(5 * time.Second))
			if n, err := d.Read(buf); err != nil || string(buf[:n]) != "word" {
				t.Errorf("client %d got %q, %v", i, buf[:n], err)
			}
		}
	}
}

// TestAReplyThatCannotBeSentConcernsOneAlone: the others in the same batch are sent.
func TestAReplyThatCannotBeSentConcernsOneAlone(t *testing.T) {
	b, at := newTestBatch(t)
	var clients []net.Conn
	for _, word := range []string{"first", "second", "third"} {
		d, err := net.Dial("udp4", at)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if _, err := d.Write([]byte(word)); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, d)
	}
	n, err := b.receive() // datagrams on loopback are there once they were written
	if err != nil || n != 3 {
		t.Fatalf("received %d, %v", n, err)
	}
	for i, d := range clients {
		raw, src := b.query(i)
		if src.String() != d.LocalAddr().String() {
			t.Errorf("%q came from %s, not from %s", raw, src, d.LocalAddr())
		}
		b.reply(i, append(append(b.space(i), "re: "...), raw...))
	}
	b.from[0].Addr = [4]byte{255, 255, 255, 255} // EACCES without SO_BROADCAST
	if err := b.send(); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "re: second", "re: third"} {
		if want == "" {
			continue
		}
		buf := make([]byte, 64)
		clients[i].SetReadDeadline(time.Now().Add(5 * time.Second))
		if n, err := clients[i].Read(buf); err != nil || string(buf[:n]) != want {
			t.Errorf("got %q, %v, want %q", buf[:n], err, want)
		}
	}
}
