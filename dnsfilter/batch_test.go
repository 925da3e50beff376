package dnsfilter

import (
	"net"
	"testing"
	"time"
)

// TestAReplyThatCannotBeSentConcernsOneAlone: the others in the same batch are sent.
func TestAReplyThatCannotBeSentConcernsOneAlone(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b, err := newBatch(c)
	if err != nil {
		t.Fatal(err)
	}
	var clients []net.Conn
	for _, word := range []string{"first", "second", "third"} {
		d, err := net.Dial("udp4", c.LocalAddr().String())
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
