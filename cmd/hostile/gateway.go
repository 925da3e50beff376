package main

import (
	"bufio"
	"errors"
	"os"
	"strings"
)

// gateway is the only address that a kid may talk to: its resolver's.
func gateway() (string, error) {
	f, err := os.Open("/etc/resolv.conf")
	if err != nil {
		return "", err
	}
	defer f.Close() // only read
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if words := strings.Fields(sc.Text()); len(words) == 2 && words[0] == "nameserver" {
			return words[1], nil
		}
	}
	return "", errors.New("no nameserver in /etc/resolv.conf")
}
