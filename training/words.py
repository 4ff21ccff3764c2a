"""Word lists from which the training text is made. All written for this project; none is taken from a data set."""

from __future__ import annotations

from random import Random


def words_of(text: str) -> list[str]:
    """Words or phrases separated by commas or line ends."""
    return [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]


NAMES = words_of("""
Ada, Lily, Max, Tom, Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Ida, Jack, Kate, Leo, Mia, Noah, Olga, Paul,
Quinn,
Rosa, Sam, Tina, Uma, Victor, Wendy, Xenia, Yara, Zoe, Alice, Bob, Carol, Daniel, Eva, Frank, Gina, Henry, Iris, Jonas,
Karin,
Lena, Mark, Nina, Oscar, Petra, Ralf, Sara, Theo, Ursula, Vera, Walter, Yusuf, Zara, Ali, Aisha, Amir, Bela, Chen,
Diego, Elif,
Fatima, Goran, Hana, Ivan, Jing, Kofi, Layla, Mei, Nadia, Omar, Priya, Ravi, Sofia, Tariq, Wei, Yuki, Akira, Sakura,
Carlos,
Maria, Pedro, Ana, Luis, Elena, Pablo, Lucia, Marta, Jean, Marie, Luc, Chloe, Pierre, Amelie, Giulia, Marco, Luca,
Paolo,
Lars, Ingrid, Sven, Astrid, Bjorn, Freya, Erik, Nils, Maja, Piotr, Kasia, Milan, Jana, Pavel, Irina, Boris, Olena,
Taras, Amara,
Kwame, Zuri, Tunde, Abena, Lucy, Molly, Daisy, Ruby, Oliver, Charlie, George, Harry, Ella, Ava, Ivy, Maya, Arjun, Anil,
Deepa,
Kiran, Meera, Nora, Otto, Emil, Greta, Hanna, Jakob, Klara, Moritz, Simon, Julia, Laura, Peter, James, John, Mary,
Robert, Linda,
William, Susan, Michael, Sarah, Thomas, Karen, Linus, Rosie, Finn, Milo, Luna, Bella, Rex, Coco, Toby, Pip, Nala,
Simba, Misty
""")

ANIMALS = words_of("""
fox, dog, cat, rabbit, bear, wolf, owl, mouse, horse, cow, pig, sheep, goat, duck, goose, hen, frog, turtle, lion,
tiger,
elephant, monkey, giraffe, zebra, panda, koala, kangaroo, penguin, dolphin, whale, shark, octopus, crab, snail, bee,
ant,
butterfly, spider, squirrel, hedgehog, beaver, otter, badger, deer, moose, camel, donkey, parrot, eagle, crow, swan,
peacock,
hamster, lizard, snake, crocodile, dragon, unicorn, seal, bat, mole, robin, sparrow, pony, puppy, kitten, lamb,
raccoon, lynx
""")

COLOURS = words_of("""
red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, gold, silver, turquoise, violet, crimson,
beige
""")

CAPITALS = dict(
    pair.split(":")
    for pair in words_of("""
France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, Austria:Vienna, Poland:Warsaw, Greece:Athens,
Norway:Oslo, Sweden:Stockholm, Finland:Helsinki, Denmark:Copenhagen, Ireland:Dublin, Belgium:Brussels, Hungary:Budapest,
Ukraine:Kyiv, Romania:Bucharest, Bulgaria:Sofia, Croatia:Zagreb, Serbia:Belgrade, Iceland:Reykjavik, Russia:Moscow,
Turkey:Ankara, Egypt:Cairo, Kenya:Nairobi, Nigeria:Abuja, Ghana:Accra, Morocco:Rabat, Ethiopia:Addis Ababa, Japan:Tokyo,
China:Beijing, India:New Delhi, South Korea:Seoul, Thailand:Bangkok, Vietnam:Hanoi, Indonesia:Jakarta, Iran:Tehran,
Iraq:Baghdad, Israel:Jerusalem, Saudi Arabia:Riyadh, Pakistan:Islamabad, Nepal:Kathmandu, Mongolia:Ulaanbaatar,
Australia:Canberra, New Zealand:Wellington, Canada:Ottawa, Mexico:Mexico City, Cuba:Havana, Brazil:Brasilia,
Argentina:Buenos Aires, Chile:Santiago, Peru:Lima, Colombia:Bogota, England:London, Scotland:Edinburgh,
Switzerland:Bern,
the United States:Washington, the United Kingdom:London, the Netherlands:Amsterdam, the Philippines:Manila
""")
)

CITIES = sorted(set(CAPITALS.values())) + words_of("""
Hamburg, Munich, Cologne, Milan, Naples, Turin, Lyon, Nice, Porto, Seville, Barcelona, Zurich, Geneva, Bergen, Kyoto,
Osaka,
Shanghai, Mumbai, Delhi, Lagos, Toronto, Montreal, Boston, Chicago, Seattle, Denver, Austin, New York, San Francisco,
Sydney,
Melbourne, Glasgow, Leeds, York, Oxford, Bristol, Liverpool, Manchester, Istanbul, Odesa, Krakow, Prague, Riga,
Vilnius, Tallinn
""")

FRUITS = words_of("""
apple, pear, plum, cherry, banana, grape, peach, melon, lemon, lime, mango, kiwi, fig, date, apricot, strawberry,
raspberry,
blueberry, pineapple, coconut, papaya, avocado
""")
FOODS = words_of("""
pizza, pasta, soup, rice, bread, cheese, salad, curry, sushi, noodles, pancakes, chocolate, cake, ice cream,
tomato soup,
dumplings, tacos, lasagne, porridge, apple pie, honey, popcorn, falafel, ramen, risotto, omelette, waffles,
fish and chips
""")
DRINKS = words_of(
    "tea, coffee, water, milk, lemonade, apple juice, orange juice, cocoa, green tea, mint tea, tomato juice"
)
JOBS = words_of("""
teacher, doctor, baker, farmer, painter, nurse, pilot, engineer, gardener, writer, carpenter, cook, driver, singer,
dentist,
librarian, programmer, plumber, tailor, firefighter, photographer, musician, scientist, lawyer, florist, sailor,
electrician
""")
HOBBIES = words_of("""
chess, swimming, painting, hiking, reading, cooking, dancing, singing, fishing, gardening, cycling, running, knitting,
skiing,
sailing, climbing, photography, yoga, tennis, football, pottery, baking, drawing, surfing, juggling, playing the piano
""")
OBJECTS = words_of("""
lamp, chair, table, book, pencil, cup, bottle, key, clock, mirror, window, door, basket, hammer, ladder, rope, candle,
blanket,
pillow, bicycle, boat, train, camera, guitar, drum, umbrella, hat, scarf, coat, boot, ring, box, bag, coin, map, kite,
ball, toy,
spoon, fork, plate, bowl, stone, feather, shell, flag, bell, wheel, engine, carpet, vase, broom, bucket, needle,
button, wallet
""")
PLACES = words_of("""
forest, village, valley, garden, meadow, castle, farm, harbour, island, mountain, river, lake, beach, desert, city,
market,
library, school, kitchen, lighthouse, bridge, mill, cave, orchard, park, station, museum, tower, cottage, jungle
""")
ADJECTIVES = words_of("""
small, brave, clever, kind, curious, quiet, happy, gentle, proud, lazy, cheerful, shy, friendly, funny, patient,
honest, playful,
hungry, sleepy, lonely, careful, wise, young, old, tiny, strong, bright, calm, busy, lucky
""")
NOUNS = words_of("""
river, cloud, storm, winter, summer, music, dream, letter, story, question, answer, number, word, colour, light,
shadow, friend,
family, road, hill, tree, leaf, flower, grass, bird, fish, fire, snow, rain, wind, star, moon, sun, sky, sea, sand,
house, roof,
wall, street, bus, ship, plane, paper, glass, metal, wood, silk, salt, sugar, bread, butter, egg, apple, idea, plan,
game, song
""")
VERBS = words_of("""
walk, run, jump, sing, read, write, draw, cook, sleep, dream, laugh, think, wait, help, build, carry, find, lose, open,
close,
paint, plant, swim, climb, travel, listen, speak, learn, teach, play, rest, watch, follow, remember, forget, begin,
finish
""")

GENERAL = words_of("""
the, a, of, and, to, in, is, it, that, this, with, for, on, as, at, by, from, or, but, not, are, was, were, be, been,
have, has, had,
will, would, can, could, should, may, might, must, do, does, did, done, made, make, over, under, into, out, up, down,
about, after,
before, between, through, during, without, within, against, because, while, where, when, who, what, which, why, how,
all, any, each,
every, both, few, more, most, other, some, such, no, nor, only, own, same, so, than, too, very, just, also, then,
there, here, now,
again, once, never, always, often, quick, lazy, brown, new, first, last, long, great, little, own, right, high,
different, next, early,
important, public, bad, able, world, hello, people, time, year, day, thing, man, woman, child, life, hand, part, place,
case, week,
company, system, program, work, government, point, home, water, mother, area, money, month, lot, study, business,
issue, side, kind,
head, service, power, hour, line, end, member, law, car, community, team, minute, body, information, back, parent,
face, others,
level, office, health, person, history, party, result, change, reason, research, girl, guy, moment, air, teacher,
force, education,
say, get, go, know, take, see, come, think, look, want, give, use, tell, ask, seem, feel, try, leave, call, need,
become, put, mean,
keep, let, begin, show, hear, move, live, believe, bring, happen, provide, sit, stand, pay, meet, include, continue,
set, lead,
understand, stop, create, spend, grow, offer, love, consider, appear, buy, serve, die, send, expect, stay, fall, cut,
reach, remain,
model, token, engine, server, python, code, data, test, example, string, function, class, return, print, value, list,
file, error,
Monday, Friday, July, English, French, German, Earth, Europe, Africa, Mr, Dr, OK, AI, I, you, he, she, we, they, them,
us, your, their
""")
HEROES = words_of("""
robot, knight, princess, wizard, pirate, ghost, king, queen, boy, girl, witch, giant, mermaid, prince, dwarf, fairy,
astronaut,
dinosaur, monster, snowman, elf, troll, little cloud, grandmother, farmer, sailor, lion cub, black cat, white rabbit,
baby elephant
""")

OPPOSITES = [
    tuple(pair.split("/"))
    for pair in words_of("""
hot/cold, big/small, tall/short, fast/slow, happy/sad, light/dark, day/night, up/down, left/right, open/closed,
early/late,
young/old, rich/poor, strong/weak, hard/soft, loud/quiet, clean/dirty, full/empty, wet/dry, heavy/light, thick/thin,
wide/narrow,
deep/shallow, high/low, near/far, good/bad, true/false, right/wrong, first/last, begin/end, push/pull, win/lose,
buy/sell,
give/take, love/hate, laugh/cry, inside/outside, above/below, before/after, front/back, top/bottom, always/never,
yes/no,
black/white, easy/difficult, cheap/expensive, beautiful/ugly, brave/cowardly, friend/enemy, summer/winter, north/south,
east/west, war/peace, life/death, alive/dead, awake/asleep, sharp/blunt, smooth/rough, sweet/sour, many/few, more/less,
arrive/leave, remember/forget, start/stop, accept/refuse, ask/answer, safe/dangerous, simple/complicated, new/old,
in/out, on/off,
warm/cool, polite/rude, patient/impatient, possible/impossible, visible/invisible, odd/even, borrow/lend,
success/failure
""")
]

THING_COLOURS = dict(
    pair.split(":")
    for pair in words_of("""
the sky:blue, grass:green, snow:white, coal:black, blood:red, a banana:yellow, a lemon:yellow, a ripe tomato:red,
an orange:orange,
chocolate:brown, milk:white, the sun:yellow, a carrot:orange, a strawberry:red, a leaf in summer:green,
the night sky:black,
the sea:blue, an elephant:grey, a frog:green, a flamingo:pink, a pig:pink, cheese:yellow, cotton:white,
a polar bear:white,
a crow:black, a swan:white, a fire engine:red, an eggplant:purple, a lime:green, a cucumber:green, rust:orange,
sand:yellow,
a sunflower:yellow, a cherry:red, a violet:purple, soil:brown, emerald:green, ruby:red, salt:white, a plum:purple
""")
)

ANIMAL_SOUNDS = dict(
    pair.split(":")
    for pair in words_of("""
cow:moo, dog:woof, cat:meow, sheep:baa, duck:quack, pig:oink, lion:roar, horse:neigh, frog:ribbit, bee:buzz, owl:hoot,
hen:cluck,
snake:hiss, wolf:howl, mouse:squeak, donkey:hee-haw, crow:caw, goose:honk
""")
)
ANIMAL_LEGS = {"spider": 8, "dog": 4, "cat": 4, "bird": 2, "ant": 6, "horse": 4, "bee": 6, "snake": 0, "cow": 4,
    "duck": 2,
               "butterfly": 6, "fish": 0, "sheep": 4, "hen": 2, "crab": 10, "octopus": 8}  # fmt: skip
ANIMAL_YOUNG = dict(
    pair.split(":")
    for pair in words_of("""
dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, duck:duckling, hen:chick, bear:cub, goat:kid, frog:tadpole,
pig:piglet,
deer:fawn, swan:cygnet, goose:gosling, kangaroo:joey, lion:cub
""")
)

DAYS = words_of("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = words_of("January, February, March, April, May, June, July, August, September, October, November, December")
SEASONS = words_of("spring, summer, autumn, winter")
ORDINALS = words_of("first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth, eleventh, twelfth")
NUMBER_WORDS = words_of("""
zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen,
seventeen, eighteen, nineteen, twenty
""")

_ONSETS = words_of(
    "b, c, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, z, br, ch, dr, fl, gr, kl, pl, sh, sk, st, th, tr, zh, qu, x, y"
)
_VOWELS = words_of("a, e, i, o, u, ai, ee, oo, ou, ia, y, ea")
_CODAS = ["", "", "", *words_of("n, r, l, s, t, m, nd, rk, ck, x, th, z, p, ng")]

COMMON = sorted({*ANIMALS, *COLOURS, *FRUITS, *OBJECTS, *PLACES, *ADJECTIVES, *NOUNS, *VERBS, *JOBS})


def pseudo_word(rng: Random, syllables: int | None = None) -> str:
    """A pronounceable word that is in no list, such as 'brelkin': keeps the model from trusting its vocabulary."""
    count = syllables or rng.choice((1, 2, 2, 2, 3, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def any_name(rng: Random) -> str:
    """A first name from the list, or (one time in four) an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.75 else pseudo_word(rng).capitalize()


def any_word(rng: Random) -> str:
    """A common word or (one time in three) an invented one."""
    return rng.choice(COMMON) if rng.random() < 0.67 else pseudo_word(rng)


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0].lower() in "aeio" or noun.startswith("um") else f"a {noun}"
