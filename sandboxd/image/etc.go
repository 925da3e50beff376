package image

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"

	"tagout/sandboxd/runtime"
)

// machineID is another one for each kid, random (machine-id(5)): what is made of it must not be the same twice.
func machineID() string {
	var id [16]byte
	rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:]) + "\n"
}

// etc returns the small files of a kid's /etc, by path below its root.
func etc(kid string, addr, gateway netip.Addr) map[string]string {
	hosts, resolv := "127.0.0.1\tlocalhost\n", "# this kid has no network\n"
	if addr.IsValid() {
		hosts += fmt.Sprintf("%s\t%s\n", addr, kid)
		// Names that the card allows answer at once, all others are refused at once: short timeouts are safe.
		resolv = fmt.Sprintf("nameserver %s\noptions timeout:2 attempts:2\n", gateway)
	}
	return map[string]string{
		"etc/passwd": fmt.Sprintf("root:x:0:0:root:/root:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"+
			"tagout-init:x:%[1]d:%[1]d::/:/usr/sbin/nologin\nkid:x:%[2]d:%[2]d:kid:%[3]s:/bin/sh\n",
			runtime.InitUID, runtime.KidUID, runtime.Home),
		"etc/machine-id":      machineID(),
		"etc/group":           fmt.Sprintf("root:x:0:\nnogroup:x:65534:\ntagout-init:x:%d:\nkid:x:%d:\n", runtime.InitUID, runtime.KidUID),
		"etc/hosts":           hosts,
		"etc/resolv.conf":     resolv,
		"etc/hostname":        kid + "\n",
		"etc/nsswitch.conf":   "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"etc/services":        "domain\t53/tcp\ndomain\t53/udp\nhttp\t80/tcp\nhttps\t443/tcp\nssh\t22/tcp\n",
		"etc/protocols":       "ip\t0\tIP\nicmp\t1\tICMP\ntcp\t6\tTCP\nudp\t17\tUDP\n",
		"etc/ssl/openssl.cnf": "# empty: OpenSSL's built-in defaults\n",
	}
}
