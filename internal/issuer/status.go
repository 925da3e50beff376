package issuer

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"fmt"
)

// Bits is a status list with one bit a token, the least significant bit of a byte first: 0 valid, 1 invalid.
type Bits []byte

// NewBits returns n valid bits; n is a multiple of 8.
func NewBits(n int) Bits { return make(Bits, n/8) }

// Set makes bit i invalid.
func (b Bits) Set(i int) { b[i/8] |= 1 << (i % 8) }

// Invalid says whether bit i is set.
func (b Bits) Invalid(i int) bool { return b[i/8]&(1<<(i%8)) != 0 }

// StatusClaims is what a status list token says. Times are seconds since 1970.
type StatusClaims struct {
	Issuer   string     `json:"iss"`
	Subject  string     `json:"sub"` // the list's URI
	IssuedAt int64      `json:"iat"`
	Expires  int64      `json:"exp"`
	TTL      int64      `json:"ttl"` // seconds for which it may be kept
	List     StatusBits `json:"status_list"`
}

// StatusBits is the list itself: base64url of the zlib-compressed bits.
type StatusBits struct {
	Bits int    `json:"bits"` // of one token
	List string `json:"lst"`
}

// StatusList signs a status list; c.List is filled in.
func (r *Ring) StatusList(c StatusClaims, bits Bits) (string, error) {
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	_, err := w.Write(bits)
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return "", fmt.Errorf("packing a status list: %w", err)
	}
	c.List = StatusBits{Bits: 1, List: base64.RawURLEncoding.EncodeToString(packed.Bytes())}
	return r.sign(TypeStatusList, c)
}
