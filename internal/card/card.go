// Package card reads job cards: one YAML file that says what a kid is for, and from which every rule about it
// (egress, filesystem, identity, limits, stop) is derived. A card that loads is safe to enforce: unknown keys,
// values out of range, contradictions and grants that nothing may give are refused when it is read, all of
// them at once, each with its line and column and with what to write instead. What a card leaves out is not
// allowed: no egress, no secrets.
//
// The same rules, as far as JSON Schema can say them, are published in deploy/schema/card-v1.json; a test
// keeps the two together.
package card

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"regexp"
	"strings"
	"time"
	"unicode"

	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// APIVersion and Kind are the first lines of every card.
const (
	APIVersion = "tagout/v1"
	Kind       = "Card"
)

// Errors is everything that is wrong with a card; Parse returns no other error.
type Errors = yamlx.Problems

// Card is a card that passed every check. Names are canonical, sizes are bytes, and everything that was left
// out has its default.
type Card struct {
	Name       string // [a-z][a-z0-9-]{0,31}
	Task       string // one plain sentence
	Owner      string // whose kid it is, for the budget; stop.authority where the card does not say
	Image      string
	Network    string          // session.NetworkNone, session.NetworkHost, or empty: what egress allows
	Reach      []session.Reach // with session.NetworkHost: all that it may connect to
	Egress     policy.Spec     // compiles; rules that expire seem to have done so: EgressAt makes the policy to enforce
	Expiries   []Expiry        // of Egress.Allow, one each
	Filesystem Filesystem
	Identity   Identity
	Env        map[string]string // never nil
	Limits     Limits
	Stop       session.Stop
	Hash       string // sha256 of the file's bytes, hex
}

// Filesystem is what a kid can read and write.
type Filesystem struct {
	Inputs    []Input
	Workspace int64 // bytes of /workspace
	Tmp       int64 // bytes of /tmp
	Root      int64 // bytes that the kid can write elsewhere; 0 but for HostWritable
	NoExec    bool  // nothing in them can be executed
}

// Input is a file that is copied into the kid before it starts.
type Input struct {
	From string      // relative, local (never above the directory it is resolved in), slash-separated
	To   string      // absolute and clean, below /workspace
	Mode fs.FileMode // permission bits only
}

// Identity is what the kid may prove to others.
type Identity struct {
	Scope    []session.Secret
	Mint     []session.Mint   // names and variables are not those of Scope
	Lifetime time.Duration    // of the session's tokens; 0: what the box allows
	NotKeys  []session.NotKey // what looks like a key in what the kid is given, and is none
}

// Limits is what a kid may use up.
type Limits struct {
	PIDs      int64   // processes and threads
	Memory    int64   // bytes
	CPUs      float64 // cores
	OpenFiles uint64  // per process
	DiskRate  int64   // bytes a second read from, and as many written to, each disk

	Idle     time.Duration // after which a kid in which nothing runs is destroyed
	Lifetime time.Duration // after which it is destroyed whatever runs in it
}

// neverPrefix begins the names of secrets that no card can be granted.
const neverPrefix = "payment_"

// NeverGranted says whether a secret can be in no card's scope, whoever asks.
func NeverGranted(secret string) bool {
	return strings.HasPrefix(strings.ToLower(secret), neverPrefix)
}

var (
	nameRE   = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	secretRE = regexp.MustCompile(`^[a-z][a-z0-9_]{0,63}$`)
	envRE    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

// Parse reads a card. file is what messages call it. The error is an Errors; with one, no card is returned.
func Parse(file string, data []byte) (*Card, error) { return ParseAt(file, data, time.Now()) }

// ParseAt reads a card as Parse does, by another clock: a rule that expires before now is refused.
func ParseAt(file string, data []byte, now time.Time) (*Card, error) {
	doc, root := yamlx.Parse(file, data)
	c := &Card{Env: map[string]string{}}
	m, _ := root.Map(cardKeys...)
	c.read(m, now)
	if err := doc.Err(); err != nil {
		return nil, err
	}
	// Nothing that passed the checks above should be refused here: the policy's own check is the last word.
	if _, err := policy.Compile(c.EgressAt(now, unconverted)); err != nil {
		m.Get("egress").Refuse("correct the rule", "the rules cannot be enforced: %v", err)
		return nil, doc.Err()
	}
	sum := sha256.Sum256(data)
	c.Hash = hex.EncodeToString(sum[:])
	return c, nil
}

func (c *Card) read(m yamlx.Map, now time.Time) {
	m.Need("apiVersion").Const(APIVersion)
	m.Need("kind").Const(Kind)
	c.readName(m.Need("name"))
	c.Task = readSentence(m.Need("task"), 200)
	c.readImage(m.Need("image"))
	c.Identity = readIdentity(m.Get("identity"))
	c.readEnv(m.Get("env"))
	c.readEgress(m.Get("egress"), now)
	c.readNetwork(m.Get("network"))
	c.readReach(m.Get("reach"))
	c.Filesystem = readFilesystem(m.Get("filesystem"), c.Image)
	c.checkMintFiles(m.Get("identity"))
	c.Limits = readLimits(m.Get("limits"))
	c.readStop(m.Need("stop"))
	c.Owner = c.Stop.Authority
	if m.Has("owner") {
		c.Owner = readSentence(m.Get("owner"), maxPerson)
	}
}

func (c *Card) readName(v yamlx.Value) {
	name, ok := v.Text()
	if ok && !nameRE.MatchString(name) {
		v.Refuse("write 1 to 32 lower-case letters, digits and hyphens, a letter first", "%s cannot name a card", yamlx.Quote(name))
	}
	c.Name = name
}

func (c *Card) readImage(v yamlx.Value) {
	image, ok := v.Text()
	if ok && image != HostImage && image != HostWritable && !NamesImage(image) {
		v.Refuse("write `image: host`, `image: host+writable`, or the name of an image that `tagout image ls` shows", "%s cannot name an image", yamlx.Quote(image))
	}
	c.Image = image
}

// readSentence reads a line for people: not blank, printable, at most that many characters.
func readSentence(v yamlx.Value, most int) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	s = strings.TrimSpace(s)
	switch {
	case s == "":
		v.Refuse("write one plain sentence", "the text is blank")
	case len([]rune(s)) > most:
		v.Refuse("write a shorter one", "the text has more than %d characters", most)
	case strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0:
		v.Refuse("write one line of printable characters", "the text has line breaks or control characters")
	}
	return s
}
