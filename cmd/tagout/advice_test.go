package main

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

var adviceRE = regexp.MustCompile("`tagout ([^`\n]+)`")

// TestAdviceIsPossible: every command line that a message or a document tells people to type is one that there is,
// with its flags.
func TestAdviceIsPossible(t *testing.T) {
	root := (&app{}).root()
	root.InitDefaultCompletionCmd()
	seen := 0
	err := fs.WalkDir(os.DirFS("../.."), ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && (name == ".git" || name == "build" || e.Name() == "testdata"):
			return fs.SkipDir
		case e.IsDir(), strings.HasSuffix(name, "_test.go"), !strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, ".md"):
			return nil
		}
		raw, err := os.ReadFile("../../" + name)
		if err != nil {
			return err
		}
		for _, m := range adviceRE.FindAllStringSubmatch(string(raw), -1) {
			seen++
			if why := impossible(root, strings.Fields(m[1])); why != "" {
				t.Errorf("%s: `tagout %s`: %s", name, m[1], why)
			}
		}
		return nil
	})
	if err != nil || seen < 10 {
		t.Fatalf("%d pieces of advice were found: %v", seen, err)
	}
}

// impossible says why the words are no command line, "" where they are one.
func impossible(root *cobra.Command, words []string) string {
	cmd, rest, err := root.Find(words)
	if err != nil {
		return err.Error()
	}
	if cmd == root {
		return "no command"
	}
	for _, w := range rest {
		if w == "--" {
			break
		}
		flag, isFlag := strings.CutPrefix(w, "--")
		flag, _, _ = strings.Cut(flag, "=")
		switch {
		case isFlag && flag != "help" && cmd.Flag(flag) == nil && root.PersistentFlags().Lookup(flag) == nil:
			return "no flag --" + flag
		case !isFlag && cmd.HasSubCommands():
			return "no such command"
		}
	}
	return ""
}
